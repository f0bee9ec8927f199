"""Random use of a cache manager (hypothesis): any order of calls that a scheduler may make keeps every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pegboard.contracts.cache import CacheManager, CacheNeed

from .cache_use import CacheUse, make_need

Make = Callable[[CacheNeed], CacheManager]
_STEMS = st.sampled_from([1, 2])
_SALTS = st.sampled_from(["", "", "t"])
#: How long a sequence gets.
_LONGEST = 90


class CacheMachine(RuleBasedStateMachine):
    """Few tokens, so that prefixes and forks meet; few pages, so that they run out."""

    make: Make
    kinds: Sequence[tuple[str, ...]]
    prefix_unit: int

    def __init__(self) -> None:
        super().__init__()
        self.use: CacheUse | None = None
        self.names = 0

    @initialize(data=st.data(), pages=st.integers(6, 14))
    def start(self, data: Any, pages: int) -> None:
        need = make_need(data.draw(st.sampled_from(self.kinds)), pages=pages)
        self.use = CacheUse(type(self).make(need), need, self.prefix_unit)

    @property
    def _use(self) -> CacheUse:
        if self.use is None:
            raise AssertionError("rules run after `start`")
        return self.use

    def _pick(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self._use.lives))))

    def _name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    def _any(self) -> bool:
        return self.use is not None and bool(self.use.lives)

    @rule(stem=_STEMS, length=st.integers(1, 60), salt=_SALTS, reuse=st.booleans())
    def open(self, stem: int, length: int, salt: str, reuse: bool) -> None:
        tokens = [stem] * 30 + [9] * 30
        self._use.open(self._name(), tokens[:length], salt=salt, reuse=reuse)

    @rule(stem=_STEMS, length=st.integers(1, 60), salt=_SALTS)
    def compute(self, stem: int, length: int, salt: str) -> None:
        """A whole prompt at once, so that there is something to find."""
        name, tokens = self._name(), ([stem] * 30 + [9] * 30)[:length]
        found = self._use.open(name, tokens, salt=salt)
        if self._use.run_row(name, tokens[found:]):
            self._use.commit(name, length)

    @precondition(_any)
    @rule(data=st.data(), back=st.integers(0, 5), count=st.integers(1, 40), more=st.integers(0, 5))
    def run_row(self, data: Any, back: int, count: int, more: int) -> None:
        name = self._pick(data)
        life = self._use.lives[name]
        start = max(life.floor, len(life.tokens) - back)
        stem = life.tokens[0] if life.tokens else data.draw(st.sampled_from([1, 2]))
        usual = [stem] * 30 + [9] * 60
        new = [7] * count if data.draw(st.booleans()) else usual[start : start + count]
        if new and start + len(new) + more <= _LONGEST:
            self._use.run_row(name, new, back=back, more=more)

    @precondition(_any)
    @rule(data=st.data(), count=st.sampled_from([1, 3, 16, 40, 90]))
    def commit(self, data: Any, count: int) -> None:
        self._use.commit(self._pick(data), count)

    @precondition(_any)
    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        self._use.truncate(self._pick(data))

    @precondition(_any)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: Any, share: float) -> None:
        name = self._pick(data)
        self._use.fork(name, self._name(), round(share * len(self._use.lives[name].tokens)))

    @precondition(_any)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self._use.release(self._pick(data))

    @precondition(lambda self: self.use is not None and self.use.retired < self.use.launched)
    @rule(count=st.integers(1, 3))
    def retire(self, count: int) -> None:
        self._use.retire(count)

    @precondition(_any)
    @rule(seldom=st.integers(0, 9))
    def reset(self, seldom: int) -> None:
        if seldom == 9:  # each time, and no prefix would ever be found
            self._use.reset()

    @invariant()
    def is_whole(self) -> None:
        if self.use is not None:
            self.use.check()

    def teardown(self) -> None:
        if self.use is not None:
            self.use.finish()


def run_cache_machine(
    make: Make, kinds: Sequence[tuple[str, ...]], prefix_unit: int, *, examples: int, steps: int
) -> None:
    """Raises, with the shortest calls that were found, where a rule is broken."""
    fields = {"make": staticmethod(make), "kinds": kinds, "prefix_unit": prefix_unit}
    run_state_machine_as_test(
        type("Machine", (CacheMachine,), fields),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
