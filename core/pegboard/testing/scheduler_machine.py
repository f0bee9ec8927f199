"""Random use of a scheduler on the simulated device (hypothesis): every call keeps every rule of the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
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

from pegboard.errors import QueueFull

from .conformance import check
from .scheduler_use import STEM, VOCABULARY, SchedulerUse

MakeUse = Callable[..., SchedulerUse]
_QUEUE = 12


class SchedulerMachine(RuleBasedStateMachine):
    make_use: MakeUse
    depths: Sequence[int]
    drafts: Sequence[int]

    def __init__(self) -> None:
        super().__init__()
        self.made: SchedulerUse | None = None

    @initialize(data=st.data(), pages=st.sampled_from([6, 10]), tokens=st.sampled_from([7, 48]))
    def start(self, data: Any, pages: int, tokens: int) -> None:
        self.made = type(self).make_use(
            data.draw(st.sampled_from(self.depths)),
            drafts=data.draw(st.sampled_from(self.drafts)),
            pages=pages,
            max_step_tokens=tokens,
            max_queue=_QUEUE,
        )

    @property
    def use(self) -> SchedulerUse:
        if self.made is None:
            raise AssertionError("rules run after `start`")
        return self.made

    def _any(self) -> bool:
        return self.made is not None and bool(self.made.live)

    def _pick(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.use.live))))

    @rule(
        shared=st.integers(0, 30),
        own=st.integers(1, 20),
        output=st.integers(1, 25),
        priority=st.integers(0, 1),
        stops=st.integers(0, 3),
        children=st.sampled_from([0, 0, 2]),
        wait=st.sampled_from([None, None, 3.0]),
        host=st.booleans(),
        seed=st.integers(0, 5),
    )
    def add(self, shared: int, own: int, output: int, priority: int, stops: int, children: int, wait: float | None,
            host: bool, seed: int) -> None:  # fmt: skip
        use = self.use
        spec = use.spec(
            prompt=STEM[:shared] + tuple((seed + i) % VOCABULARY for i in range(own)),
            output=output,
            stop_ids=frozenset(range(stops)),
            priority=priority,
            deadline=None if wait is None else use.clock() + wait,
            needs_host_token=host,
            seed=seed,
        )
        specs = [spec] + [
            msgspec.structs.replace(spec, id=f"{spec.id}-{child}", parent=spec.id, seed=100 + child)
            for child in range(children)
        ]
        try:
            use.add(*specs)
        except QueueFull:
            check(use.scheduler.stats().waiting + len(specs) > _QUEUE, "QueueFull, and there is room")

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.use.step()
            self.use.scheduler.check_integrity()

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        """A deadline that has passed ends its sequence with the next step."""
        use = self.use
        use.clock.advance(seconds)
        late = [name for name in use.live if (use.stories[name].spec.deadline or 1e9) <= use.clock()]
        use.step()
        left = [name for name in late if name in use.live]
        check(not left, f"{left} are live after a step beyond their deadline")

    @precondition(_any)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        name = self._pick(data)
        check(self.use.scheduler.finish(name, "abort"), f"finish says that {name!r} is not live")
        check(not self.use.scheduler.finish(name, "abort"), f"{name!r} ends twice")
        self.use.step()
        check(self.use.reason(name) == "abort", f"{name!r} was aborted and ends with {self.use.reason(name)!r}")

    @precondition(_any)
    @rule(data=st.data())
    def pause(self, data: Any) -> None:
        check(self.use.pause(self._pick(data)), "a live sequence can't be paused")

    @precondition(_any)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        check(self.use.resume(self._pick(data)), "a live sequence can't be resumed")

    @precondition(_any)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        """The child goes on as a sequence whose output begins with its parent's. Refused while something flies."""
        use, name = self.use, self._pick(data)
        spec = use.stories[name].spec
        child = msgspec.structs.replace(spec, id=f"r{len(use.stories)}", parent=None, deadline=None)
        try:
            use.fork(name, child)
        except (ValueError, QueueFull):
            check(not use.scheduler.is_live(child.id), "a fork was refused, and its child is live")

    @rule(launched=st.booleans())
    def fail(self, launched: bool) -> None:
        """A step raises, at launch or when it should retire; those it touched end with an error, but for those that an
        earlier loss or a preemption has made start over: what flew of them was void."""
        use = self.use
        if launched and use.device.flying:
            touched, _ = use.lose()
        else:
            plan = use.plan()
            if plan is None:
                return
            touched = {row.id for row in plan.rows}
            use.scheduler.fail(plan.id, "it broke")
        use.take(use.scheduler.commit(None))
        wrong = [name for name in touched if use.reason(name) not in (None, "error")]
        check(not wrong, f"{wrong} were in a lost step, and do not end with an error")
        use.void |= {name for name in touched if use.reason(name) is None}

    @invariant()
    def is_whole(self) -> None:
        if self.made is not None:
            self.made.scheduler.check_integrity()
            self.made.take(self.made.scheduler.commit(None))
            self.made.hold()

    def teardown(self) -> None:
        if self.made is not None:
            self.made.finish()


def run_scheduler_machine(
    make_use: MakeUse, depths: Sequence[int], drafts: Sequence[int], *, examples: int, steps: int
) -> None:
    """Raises, with the shortest calls that were found, where a rule is broken."""
    fields = {"make_use": staticmethod(make_use), "depths": depths, "drafts": drafts}
    run_state_machine_as_test(
        type("Machine", (SchedulerMachine,), fields),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
