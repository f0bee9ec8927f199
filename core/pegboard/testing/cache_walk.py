"""Long random use of a cache manager with many sequences alive, by a seed: what short runs of few calls don't reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from pegboard.contracts.cache import CacheManager, CacheNeed

from .cache_use import CacheUse, make_need

_LONGEST = 90
#: Calls with how often they come.
_WEIGHTS = {"open": 10, "run_row": 30, "commit": 15, "fork": 12, "release": 10, "truncate": 4, "retire": 15, "reset": 1}


class CacheWalk:
    """`run(steps)` raises AssertionError with the calls that led there."""

    def __init__(
        self, make: Callable[[CacheNeed], CacheManager], kinds: Sequence[str], prefix_unit: int, seed: int
    ) -> None:
        self._random = Random(f"{kinds} {seed}")
        need = make_need(kinds, pages=self._random.choice([8, 14, 40]))
        self._use = CacheUse(make(need), need, prefix_unit)
        self._names = 0
        self._calls: list[str] = []

    def run(self, steps: int) -> None:
        names, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        try:
            for _ in range(steps):
                call = self._random.choices(names, weights)[0]
                if self._use.lives or call in ("open", "retire"):
                    getattr(self, f"_{call}")()
                    self._use.check()
            self._use.finish()
        except Exception as error:
            calls = "\n  ".join(self._calls[-12:])
            raise AssertionError(f"{error}\nafter {len(self._calls)} calls, the last of them\n  {calls}") from error

    def _note(self, call: str) -> None:
        self._calls.append(call)

    def _pick(self) -> str:
        return self._random.choice(sorted(self._use.lives))

    def _name(self) -> str:
        self._names += 1
        return f"s{self._names}"

    def _open(self) -> None:
        random, name = self._random, self._name()
        if len(self._use.lives) >= 8:
            return
        stem, length = random.choice([1, 2]), random.randrange(1, 60)
        salt, reuse = random.choice(["", "", "t"]), random.random() < 0.8
        self._note(f"open {name}: {length} tokens of {stem}, salt={salt!r}, reuse={reuse}")
        self._use.open(name, ([stem] * 30 + [9] * 30)[:length], salt=salt, reuse=reuse)

    def _run_row(self) -> None:
        random, name = self._random, self._pick()
        life = self._use.lives[name]
        count, back, more = random.choice([1, 1, 2, 7, 16, 40]), random.choice([0, 0, 3]), random.choice([0, 0, 4])
        start = max(life.floor, len(life.tokens) - back)
        stem = life.tokens[0] if life.tokens else random.choice([1, 2])
        usual = ([stem] * 30 + [9] * 60)[start : start + count]
        new = [random.choice([7, 8])] * count if random.random() < 0.4 else usual
        if new and start + len(new) + more <= _LONGEST:
            self._note(f"{name}: write {new} at {start}, {more} more reserved")
            self._use.run_row(name, new, back=back, more=more)

    def _commit(self) -> None:
        name, count = self._pick(), self._random.choice([1, 5, 16, 90])
        self._note(f"{name}: commit {count} at {self._use.lives[name].committed}")
        self._use.commit(name, count)

    def _fork(self) -> None:
        if len(self._use.lives) >= 8:
            return
        name, child = self._pick(), self._name()
        longest = len(self._use.lives[name].tokens)
        length = longest if self._random.random() < 0.6 else self._random.randrange(longest + 1)
        self._note(f"fork {name} at {length}: {child}")
        self._use.fork(name, child, length)

    def _release(self) -> None:
        name = self._pick()
        self._note(f"release {name}")
        self._use.release(name)

    def _truncate(self) -> None:
        name = self._pick()
        self._note(f"truncate {name}")
        self._use.truncate(name)

    def _retire(self) -> None:
        count = self._random.choice([1, 1, 3])
        self._note(f"retire {count}")
        self._use.retire(count)

    def _reset(self) -> None:
        self._note("reset")
        self._use.reset()
