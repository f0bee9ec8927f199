"""Conformance of schedulers, on the simulated device: whatever is decided, each sequence gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest

from pegboard.contracts.cache import CacheManager
from pegboard.contracts.part import Part
from pegboard.contracts.sampler import SamplingParams
from pegboard.contracts.scheduler import RowResult, SchedulerNeed, StepResult
from pegboard.errors import InvalidRequest, QueueFull

from .cache_use import make_need
from .clock import FakeClock
from .conformance import Candidate, Suite, check
from .raising import raises
from .scheduler_use import STEM, VOCABULARY, SchedulerUse, make_traffic
from .simulated import reference, run_step

MAX_LENGTH = 96
MAX_QUEUE = 40

MakeUse = Callable[..., SchedulerUse]


class SchedulerSuite(Suite, standard=True):
    """A scheduler against `pegboard.contracts.scheduler`.

    Features: "drafts" (rows carry drafts where they may), "preemption" (pages are taken from who runs), "priorities"
    (of two that wait, the higher goes first), "ageing" (a steady stream of higher ones does not keep a lower one
    waiting for ever). Each test runs at every depth of `depths`."""

    role = "scheduler"
    features = ("drafts", "preemption", "priorities", "ageing")
    axes = {"depth": "depths"}

    #: How many steps fly. A scheduler that refuses one of them is not tested there.
    depths: ClassVar[tuple[int, ...]] = (0, 1, 2)
    #: The cache manager that the scheduler is given: an installed part's name, a `Part`, or a factory class.
    cache: ClassVar[Part | type | str] = "paged"
    cache_options: ClassVar[Any] = None
    #: Seconds that pass with each step where waiting must weigh something.
    step_seconds: ClassVar[float] = 1.0

    @classmethod
    def limits(cls, **fields: Any) -> SchedulerNeed:
        given = {"max_rows": 4, "max_step_tokens": 48, "max_queue": MAX_QUEUE, "max_length": MAX_LENGTH}
        return SchedulerNeed(**(given | fields))

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, SchedulerNeed]]:
        yield from ((f"depth {depth}", cls.limits(depth=depth)) for depth in cls.depths)
        if "drafts" in cls.claims:
            yield "claim drafts", cls.limits(decode_width=4)

    @pytest.fixture
    def make_use(self, candidate: Candidate) -> MakeUse:
        """make_use(depth, kinds=("full",), pages=40, drafts=0, **limits): a scheduler with a cache of its own and a
        device."""
        return partial(self.use_of, candidate)

    @classmethod
    def use_of(
        cls,
        candidate: Candidate,
        depth: int = 0,
        *,
        kinds: tuple[str, ...] = ("full",),
        pages: int = 40,
        drafts: int = 0,
        **fields: Any,
    ) -> SchedulerUse:
        """What `make_use` makes. The test is skipped if the scheduler refuses the limits."""
        limits = cls.limits(depth=depth, decode_width=1 + drafts, **fields)
        need = make_need(
            kinds, pages=pages, max_rows=limits.max_rows, max_length=limits.max_length, max_query=1 + drafts
        )
        cache: CacheManager = cls._cache_candidate().create(need)
        clock = FakeClock()
        return SchedulerUse(candidate.create(limits, cache=cache, clock=clock), cache, need, limits, clock)

    @classmethod
    def _cache_candidate(cls) -> Candidate:
        from .conformance import _registered

        if isinstance(cls.cache, type):
            return Candidate(cls.cache, cls.cache_options)
        entry = _registered("cache", cls.cache)
        return Candidate(entry.load(), entry.options(cls.cache_options or {}))

    # -- outputs -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kinds", [("full",), ("full", "window"), ("window",), ("full", "state")], ids="+".join)
    def test_outputs_are_those_of_each_alone(self, make_use: MakeUse, depth: int, kinds: tuple[str, ...]) -> None:
        """Chunks, neighbours, shared prefixes, children and running ahead change nothing."""
        for seed in range(self._turns(2)):
            use = make_use(depth, kinds=kinds, pages=60, max_rows=6)
            use.add(*make_traffic(use, seed))
            use.run()
            use.hold_outputs()

    def test_drafts_change_no_output(self, make_use: MakeUse, depth: int) -> None:
        """Right and wrong drafts, up to the very end of a sequence, and no more of them than are wanted."""
        for seed in range(self._turns(3)):
            use = make_use(depth, drafts=3, pages=30, max_rows=6)
            use.add(*make_traffic(use, seed))
            drafted = 0
            while use.step():
                drafted += sum(row.drafts for row in use.planned)
            use.hold("drafts", "length")
            use.hold_outputs()
            check(drafted > 0 or "drafts" not in self.claims, 'claims "drafts", and plans none')

    def test_preemption_changes_no_output(self, make_use: MakeUse, depth: int) -> None:
        """With pages for one longest sequence and not much more, everybody ends, and nobody waits for ever."""
        for seed in range(self._turns(2)):
            use = make_use(depth, pages=7, max_step_tokens=96)
            for number in range(8):
                use.ask(prompt=(seed, *STEM[: 20 + number]), output=60, seed=number, priority=number % 2)
            use.run()
            use.hold_outputs()
            some = use.scheduler.stats().preemptions_total > 0
            check(some or "preemption" not in self.claims, 'claims "preemption", and eight had room in seven pages')
            told = sum(story.end.preemptions for story in use.stories.values() if story.end is not None)
            check(told == use.scheduler.stats().preemptions_total, "preemptions of the ends don't add up to the total")

    def test_max_length_is_exact(self, make_use: MakeUse, depth: int) -> None:
        """No token more, none less, whatever flies when the last one is chosen."""
        use = make_use(depth, drafts=2)
        for output in (1, 2, 3, 5, 16, 17):
            use.ask(prompt=STEM[:15], output=output, seed=output)
        use.ask(prompt=STEM, max_length=MAX_LENGTH)
        use.run()
        for name, story in use.stories.items():
            wanted = story.spec.max_length - len(story.spec.prompt)
            check(len(story.tokens) == wanted, f"{name!r}: {len(story.tokens)} tokens, max_length leaves {wanted}")
            check(use.reason(name) == "length", f"{name!r} ends with {use.reason(name)!r}, not 'length'")

    def test_stops_wait_for_min_tokens(self, make_use: MakeUse, depth: int) -> None:
        """A stop id ends the text and is its last token; the first `min_tokens` tokens hold none."""
        use = make_use(depth, drafts=2)
        for least in (0, 3, 9, 19):
            stops = frozenset(range(0, VOCABULARY, 2))
            use.ask(stop_ids=stops, sampling=SamplingParams(min_tokens=least), seed=least)
        use.run()
        for name, story in use.stories.items():
            least, stops = story.spec.sampling.min_tokens, story.spec.stop_ids
            early = [token for token in story.tokens[: max(least, len(story.tokens) - 1)] if token in stops]
            check(not early, f"{name!r}: {story.tokens} goes on after, or stops too early at, {early}")
            ended = story.tokens[-1] in stops if len(story.tokens) < 20 else True
            check(ended, f"{name!r} ended after {len(story.tokens)} of 20 tokens without a stop")

    def test_host_tokens_are_waited_for(self, make_use: MakeUse, depth: int) -> None:
        """A row whose part must see each token never runs ahead; its neighbours do."""
        use = make_use(depth)
        use.ask(needs_host_token=True)
        use.ask(seed=1)
        ahead = False
        while use.step():
            ahead = ahead or any(row.id == "r1" and not row.tokens for row in use.planned)
        use.hold("host")
        check(ahead or depth == 0, "a neighbour of a row that waits for the host does not run ahead")
        use.hold_outputs()

    def test_prompt_logprobs_are_told_once(self, make_use: MakeUse, depth: int) -> None:
        """Of every prompt token but the first, in order, also when a prompt runs in chunks or starts over."""
        use = make_use(depth, pages=7, max_step_tokens=13)
        wanted = SamplingParams(prompt_logprobs=2)
        for number in range(5):
            use.ask(prompt=(number, *STEM), sampling=wanted, output=40, seed=number)
        use.ask(prompt=(4, *STEM), output=5)
        use.run()
        for name, story in use.stories.items():
            found = tuple(record.token_id for record in story.prompt_logprobs)
            expected = story.spec.prompt[1:] if story.spec.sampling.prompt_logprobs is not None else ()
            check(found == expected, f"{name!r}: prompt logprobs of {found}, expected {expected}")

    # -- plans -------------------------------------------------------------------------------------------------------

    def test_limits_are_kept(self, make_use: MakeUse, depth: int) -> None:
        """Rows, tokens and steps in flight; no row beyond its sequence's max_length."""
        for rows, tokens in ((1, 1), (2, 3), (4, 7), (6, 96)):
            use = make_use(depth, max_rows=rows, max_step_tokens=tokens)
            use.add(*make_traffic(use, rows))
            use.run()
            use.hold("limits", "length")

    def test_decode_rows_come_first(self, make_use: MakeUse, depth: int) -> None:
        use = make_use(depth, max_step_tokens=16)
        for number in range(8):
            use.ask(prompt=(number, *STEM), seed=number)
            use.step()
        use.run()
        use.hold("order")

    def test_slots_are_held_for_life(self, make_use: MakeUse, depth: int) -> None:
        """From the first row to the end, through preemption; whoever begins in a slot brings its opening."""
        use = make_use(depth, pages=8)
        for number in range(10):
            use.ask(prompt=(number, *STEM), output=40, seed=number)
        use.run()
        use.hold("slots", "openings")

    def test_the_same_calls_give_the_same_plans(self, make_use: MakeUse, depth: int) -> None:
        """No set order, no wall clock, no chance: a run can be repeated."""

        def trace() -> list[Any]:
            use = make_use(depth, pages=12)
            use.add(*make_traffic(use, 3))
            seen: list[Any] = []
            while use.step():
                seen.append(use.planned)
                use.clock.advance(0.5)
            return seen

        check(trace() == trace(), "two schedulers that were called alike have other plans")

    # -- ends --------------------------------------------------------------------------------------------------------

    def test_aborts_at_any_moment(self, make_use: MakeUse, depth: int) -> None:
        """Waiting, prefilling, decoding or in flight: one end, by the next commit, and nobody else is hurt."""
        for moment in range(8):
            use = make_use(depth, max_rows=2, max_step_tokens=20)
            for number in range(4):
                use.ask(prompt=(number, *STEM), seed=number)
            for _ in range(moment):
                use.step()
            for name in ("r0", "r3"):
                live = name in use.live
                check(use.scheduler.finish(name, "abort") is live, f"finish of {name!r} says it is not live")
                check(not use.scheduler.finish(name, "abort"), f"{name!r} can be ended twice")
                check(not use.scheduler.is_live(name), f"{name!r} is live after its end")
                use.take(use.scheduler.commit(None))
                check(not live or use.reason(name) == "abort", f"{name!r} ends with {use.reason(name)!r}, not 'abort'")
            use.run()
            use.hold("ends")
            use.hold_outputs()

    def test_deadlines_end_what_is_late(self, make_use: MakeUse, depth: int) -> None:
        """At the latest one step after it, waiting or running; `next_deadline` is the earliest of the living."""
        use = make_use(depth, max_rows=2)
        for number, deadline in enumerate((None, 8.0, 5.0, 30.0)):
            use.ask(prompt=(number, *STEM), output=60, seed=number, deadline=deadline)
        check(use.scheduler.next_deadline() == 5.0, f"next_deadline is {use.scheduler.next_deadline()}, not 5.0")
        for seconds, ended in ((4.0, set()), (2.0, {"r2"}), (3.0, {"r1", "r2"})):
            use.clock.advance(seconds)
            use.step()
            late = {name for name in use.stories if use.reason(name) == "deadline"}
            check(late == ended, f"at {use.clock()} {late} ended by deadline, expected {ended}")
        check(use.scheduler.next_deadline() == 30.0, f"next_deadline is {use.scheduler.next_deadline()}, not 30.0")
        use.run()
        check(use.scheduler.next_deadline() is None, "a deadline of the dead")
        use.hold("ends")
        use.hold_outputs()

    def test_everything_is_given_back(self, make_use: MakeUse, depth: int) -> None:
        """Pages, slots and places in the queue, after ends of every kind; then there is no work."""
        use = make_use(depth, pages=12)
        check(not use.scheduler.has_work(), "has work before anything was added")
        use.add(*make_traffic(use, 5))
        check(use.scheduler.has_work(), "has no work, and 12 wait")
        for turn in range(6):
            use.step()
            if use.live:
                use.scheduler.finish(use.live[turn % len(use.live)], "abort")
        check(use.scheduler.has_work(), "has no work before the last progress was taken")
        use.run()
        use.hold_pages()
        check(use.scheduler.schedule() is None, "plans a step for nobody")
        for _ in range(2):
            use.add(*(use.spec(id=f"again {i}", max_length=40) for i in range(MAX_QUEUE)))
            for i in range(MAX_QUEUE):
                use.scheduler.finish(f"again {i}", "abort")
            use.take(use.scheduler.commit(None))

    def test_lost_steps_end_their_rows_only(self, make_use: MakeUse, depth: int) -> None:
        """A step raises at launch or when it should retire: its rows end with the error, pages come back, the others
        get what they get alone. ValueError for a step that does not fly."""
        for moment in range(1, 7):
            for launched in (True, False):
                use = make_use(depth, max_rows=3)
                for number in range(6):
                    use.ask(prompt=(*STEM[:20], number), seed=number, parent="r0" if number == 1 else None)
                for _ in range(moment):
                    use.step()
                error = "the device is gone"
                if launched and use.device.flying:
                    touched, error = use.lose()
                else:
                    plan = use.plan()
                    if plan is None:
                        continue
                    touched = {row.id for row in plan.rows}
                    use.scheduler.fail(plan.id, error)
                use.take(use.scheduler.commit(None))
                for name in touched:
                    end = use.stories[name].end
                    told = end is not None and end.finish_reason == "error" and error in str(end.error)
                    check(told, f"{name!r} was in a step that was lost, and ends with {end}")
                use.run()
                wrong = [n for n in use.stories if n not in touched and use.reason(n) not in ("stop", "length")]
                check(not wrong, f"{wrong} were in no step that was lost, and end otherwise than alone")
                use.hold_outputs()
                use.hold_pages()
                raises(ValueError, partial(use.scheduler.fail, 10_000, "?"), "fail of a step that never was")

    def test_a_failed_row_hurts_no_other(self, make_use: MakeUse, depth: int) -> None:
        """NaN logits: that sequence ends with the error, and no prefix that it may have spoilt is found again."""
        use = make_use(depth)
        use.ask(output=30)
        use.ask(prompt=(31, *STEM), seed=1)
        for _ in range(6):
            use.step()
        use.drain()
        plan = use.plan()
        check(plan is not None, "two sequences run, nothing flies, and nothing is planned")
        if plan is None:
            return
        use.device.launch(plan)
        result = use.device.retire(0)
        if result is None:
            return
        failed = RowResult(id="r0", epoch=use.stories["r0"].epoch, error="NaN", tainted=True)
        rows = tuple(failed if row.id == "r0" else row for row in result.rows)
        use.take(use.scheduler.commit(StepResult(step=result.step, rows=rows)))
        end = use.stories["r0"].end
        check(end is not None and end.finish_reason == "error" and "NaN" in str(end.error), f"r0 ends with {end}")
        later = use.ask()
        use.run()
        check(use.reason("r1") == "length", f"the neighbour of a failed row ends with {use.reason('r1')!r}")
        use.hold_outputs()
        cached = use.stories[later.id].end
        check(cached is not None and cached.cached_tokens == 0, "the prefix of a row with NaN was used again")

    def test_cached_tokens_were_not_computed(self, make_use: MakeUse) -> None:
        """What an end reports as cached is what the device did not run."""
        use = make_use()
        for _ in range(2):
            before = use.device.queries
            name = use.ask(prompt=STEM, output=10).id
            use.run()
            end = use.stories[name].end
            cached = 0 if end is None else end.cached_tokens
            ran = use.device.queries - before
            check(ran == len(STEM) + 9 - cached, f"{ran} queries for 30 prompt tokens, {cached} of them cached")

    # -- order -------------------------------------------------------------------------------------------------------

    def test_higher_priority_goes_first(self, make_use: MakeUse) -> None:
        use = make_use(max_rows=1)
        for number, priority in enumerate((0, 2, 1)):
            use.ask(priority=priority, seed=number, output=4)
        order: list[str] = []
        while use.step():
            order += [row.id for row in use.planned if row.id not in order]
        right = order == ["r1", "r2", "r0"]
        if not right and "priorities" not in self.claims:
            pytest.skip("the scheduler does not go by priority, and does not claim to")
        check(right, f"ran {order}; by priority it is r1, r2, r0")

    def test_nobody_starves(self, make_use: MakeUse) -> None:
        """One of low priority ends although there is always one of a higher that waits."""
        use = make_use(max_rows=1)
        use.ask(output=2)
        low = use.ask(output=2, seed=1).id
        for number in range(400):
            if use.scheduler.stats().waiting < 3:
                use.ask(output=2, seed=number, priority=1)
            use.step()
            use.clock.advance(self.step_seconds)
            if use.stories[low].end is not None:
                return
        if "ageing" not in self.claims:
            pytest.skip("a low priority starves beside a steady stream of higher ones; it is not claimed otherwise")
        check(False, f"{low!r} waits for ever behind higher priorities ({self.step_seconds} s a step, 400 steps)")

    # -- admission ---------------------------------------------------------------------------------------------------

    def test_all_or_none_are_admitted(self, make_use: MakeUse) -> None:
        """QueueFull and InvalidRequest leave nobody of the group behind."""
        use = make_use(max_queue=5)
        use.add(*(use.spec(id=f"a{i}") for i in range(3)))
        raises(QueueFull, lambda: use.scheduler.add([use.spec(id=f"b{i}") for i in range(3)]), "6 for 5 places")
        fine, empty = use.spec(id="c0"), use.spec(id="c1", prompt=(), max_length=5)
        raises(InvalidRequest, lambda: use.scheduler.add([fine, empty]), "an empty prompt")
        for name in ("b0", "b1", "b2", "c0", "c1"):
            check(not use.scheduler.is_live(name), f"{name!r} was admitted though the call raised")
        check(use.scheduler.stats().waiting == 3, f"3 wait, not {use.scheduler.stats().waiting}")
        use.add(use.spec(id="d0"), use.spec(id="d1"))
        use.run()
        use.hold_outputs()

    def test_what_can_never_run_is_refused(self, make_use: MakeUse) -> None:
        """Longer than the engine's limit, or than the whole cache: at once, not after a wait without end."""
        use = make_use(pages=7)
        raises(InvalidRequest, lambda: use.scheduler.add([use.spec(max_length=MAX_LENGTH + 1)]), "beyond max_length")
        raises(InvalidRequest, lambda: use.scheduler.add([use.spec(max_length=len(STEM))]), "no room for a token")
        use.ask(max_length=MAX_LENGTH)
        use.run()
        use.hold_outputs()

    def test_live_ids_are_refused(self, make_use: MakeUse) -> None:
        use = make_use()
        use.ask(id="a")
        raises(ValueError, lambda: use.scheduler.add([use.spec(id="b"), use.spec(id="a")]), "an id that is live")
        raises(ValueError, lambda: use.scheduler.add([use.spec(id="c"), use.spec(id="c")]), "the same id twice")
        for name in ("b", "c"):
            check(not use.scheduler.is_live(name), f"{name!r} was admitted though the call raised")
        use.run()
        use.stories.clear()
        use.ask(id="a")  # free again
        use.run()
        use.hold_outputs()

    # -- calls from outside ------------------------------------------------------------------------------------------

    def test_the_paused_wait(self, make_use: MakeUse, depth: int) -> None:
        """No row until `resume`, whatever phase it is in; others that run go on to their end."""
        for moment in range(6):
            use = make_use(depth, max_rows=2, pages=12)
            for number in range(4):
                use.ask(prompt=(number, *STEM), seed=number, output=30)
            for _ in range(moment):
                use.step()
            for name in ("r0", "r2"):
                if name in use.live:
                    check(use.pause(name), f"pause says that {name!r} is not live")
            while use.step():
                pass
            use.hold("paused")
            stuck = [name for name in ("r1", "r3") if name in use.live and use.stories[name].tokens]
            check(not stuck, f"{stuck} stand still beside the paused r0 and r2")
            use.run()
            use.hold_outputs()
            use.hold_pages()
            check(not use.scheduler.pause("r0") and not use.scheduler.resume("r0"), "the dead can be paused")

    def test_forks_go_on_like_their_parent(self, make_use: MakeUse, depth: int) -> None:
        """With the parent's tokens and entries, and tokens of the host's own choice after them (beams)."""
        use = make_use(depth)
        use.ask(needs_host_token=True, output=30)
        while not use.stories["r0"].tokens:
            use.step()
        raises(KeyError, lambda: use.scheduler.fork("nobody", use.spec(id="x")), "fork of nobody")
        twin = msgspec.structs.replace(use.stories["r0"].spec, id="twin")
        use.fork("r0", twin)
        use.run()
        check(use.stories["twin"].tokens == use.stories["r0"].tokens, "a fork with the parent's seed has other tokens")
        use.hold_outputs()
        use.hold_pages()

    def test_chosen_tokens_are_taken_up(self, make_use: MakeUse, depth: int) -> None:
        """`extend`, and the tokens of `fork`: as if the sequence had chosen them itself."""
        use = make_use(depth)
        parent = use.ask(needs_host_token=True, output=20)
        while len(use.stories["r0"].tokens) < 3:
            use.step()
        start = list(use.stories["r0"].tokens)
        child = msgspec.structs.replace(parent, id="child")
        use.fork("r0", child, (7, 8))
        use.scheduler.extend("r0", (9,))
        use.run()
        for name, chosen in (("child", [7, 8]), ("r0", [9])):
            tokens = use.stories[name].tokens
            told = [*start, *chosen]
            check(tokens[: len(told)] == told, f"{name!r}: {tokens}, but {told} were known and chosen")
            alone = msgspec.structs.replace(parent, prompt=(*parent.prompt, *told))
            check(tuple(tokens[len(told) :]) == reference(alone, VOCABULARY)[0], f"{name!r} goes on as another would")
        raises(KeyError, lambda: use.scheduler.extend("r0", (1,)), "extend of a sequence that has ended")

    def test_the_host_chooses_where_it_says(self, make_use: MakeUse, depth: int) -> None:
        """`SequenceSpec.host_chooses`: log-probabilities are told, no token is taken, nothing runs until `extend`."""
        use = make_use(depth)
        if not use.scheduler.host_chooses:
            pytest.skip("it serves no sequences whose tokens the host chooses, and doesn't say that it does")
        spec = use.spec(sampling=SamplingParams(logprobs=0), host_chooses=True, needs_host_token=True)
        use.scheduler.add((spec,))
        told: list[int] = []
        for token in (5, 6, 7):
            found = [progress for _ in range(depth + 6) for progress in run_step(use.scheduler, use.device, depth)]
            records = [record for progress in found for record in progress.logprobs]
            check(len(records) == 1, f"one row of it ran, and {len(records)} log-probabilities were told")
            taken = [known for progress in found for known in progress.tokens]
            check(taken == told[-1:], f"tokens {taken} were told, the host chose {told[-1:]}")
            use.scheduler.extend(spec.id, (token,))
            told.append(token)
        use.scheduler.fork(spec.id, msgspec.structs.replace(spec, id="child"), ())
        check(use.scheduler.finish(spec.id, "abort") and use.scheduler.finish("child", "abort"), "it is not live")
        while use.scheduler.has_work() or use.device.flying:
            run_step(use.scheduler, use.device, depth)
        use.scheduler.check_integrity()
        check(use.cache.stats().held == 0, "pages are held by nobody")

    # -- the whole ---------------------------------------------------------------------------------------------------

    def test_many_cancels_leak_nothing(self, make_use: MakeUse, depth: int) -> None:
        random = Random(depth)
        use = make_use(depth, drafts=2, pages=9, max_queue=64)
        for number in range({"small": 100, "normal": 1000, "full": 4000}[self.grid]):
            while len(use.live) < 12:
                use.ask(prompt=(*STEM[: random.randrange(1, 30)], len(use.stories) % VOCABULARY), seed=number)
            name = random.choice(use.live)
            check(use.scheduler.finish(name, "abort"), f"{name!r} is not live")
            use.step()
            check(use.reason(name) == "abort", f"{name!r} was aborted, and ends with {use.reason(name)!r}")
        use.run()
        use.hold("ends")
        use.hold_outputs()
        use.hold_pages()

    def test_random_use(self, candidate: Candidate) -> None:
        """Any order of calls, with steps that are lost: all rules hold after each (hypothesis)."""
        pytest.importorskip("hypothesis")
        from .scheduler_machine import run_scheduler_machine

        depths = [d for d in self.depths if not candidate.refusals(self.limits(depth=d))]
        drafts = [d for d in (0, 2) if not candidate.refusals(self.limits(decode_width=1 + d))]
        examples, steps = {"small": (10, 20), "normal": (80, 30), "full": (1000, 50)}[self.grid]
        run_scheduler_machine(partial(self.use_of, candidate), depths, drafts, examples=examples, steps=steps)

    def _turns(self, count: int) -> int:
        return {"small": 1, "normal": count, "full": 25 * count}[self.grid]
