"""Random use of a scheduler on the simulated device: every rule keeps every invariant, outputs are as if alone."""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pegboard.contracts.attention import KVLayout
from pegboard.contracts.cache import CacheGroup, CacheNeed
from pegboard.contracts.sampler import SamplingParams
from pegboard.contracts.scheduler import SchedulerNeed, SequenceSpec
from pegboard.errors import QueueFull
from pegboard.testing.clock import FakeClock
from pegboard.testing.simulated import SimulatedDevice, reference, run_step
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions, StaticOptions
from pegboard_scheduling.static import StaticScheduler

FULL = int(os.environ.get("PEGBOARD_FULL", "0"))
VOCAB = 32
STEM = tuple(range(1, 31))


class Parts:
    """A scheduler, its cache and its device, with the checks that hold at the end of any use."""

    def __init__(self, depth, drafts=0, pages=5, policy="continuous", chunk=None, seed=0, max_queue=12):
        group = CacheGroup(
            index=0, kind="full", layers=(0,), layout=KVLayout(name="n", tensors=()), page_bytes=1
        )  # fmt: skip
        need = CacheNeed(groups=(group,), page_size=16, budget_bytes=pages + 1, max_rows=4, max_length=80)
        limits = SchedulerNeed(
            max_rows=4, max_step_tokens=48, max_queue=max_queue, max_length=80, depth=depth, decode_width=1 + drafts
        )
        self.depth = depth
        self.drafts = drafts
        self.clock = FakeClock()
        self.cache = PagedCache.create(need, PagedOptions())
        kind, options = {
            "continuous": (ContinuousScheduler, ContinuousOptions(chunk=chunk)),
            "static": (StaticScheduler, StaticOptions()),
        }[policy]
        self.scheduler = kind.create(limits, options, cache=self.cache, clock=self.clock)
        self.device = SimulatedDevice(need, self.cache.pages, vocab=VOCAB, random=Random(seed))
        self.specs = {}
        self.tokens = {}
        self.ends = {}

    def spec(self, **fields):
        name = f"r{len(self.specs)}"
        fields = {"prompt": STEM, "sampling": SamplingParams(), "seed": 0, "max_length": 60} | fields
        spec = SequenceSpec(id=name, max_drafts=self.drafts, arrival=self.clock(), **fields)
        self.specs[name] = spec
        return spec

    def take(self, progresses):
        for progress in progresses:
            assert progress.id not in self.ends, f"{progress.id} went on after its end"
            self.tokens.setdefault(progress.id, []).extend(progress.tokens)
            if progress.finish_reason is not None:
                self.ends[progress.id] = progress.finish_reason

    def step(self):
        self.take(run_step(self.scheduler, self.device, self.depth))

    def finish(self):
        for name in self.specs:
            self.scheduler.resume(name)
        for _ in range(3000):
            if not self.scheduler.has_work() and not self.device.flying:
                break
            self.step()
        assert not self.scheduler.has_work()
        assert set(self.ends) == set(self.specs)
        for name, spec in self.specs.items():
            output, reason = reference(spec, VOCAB)
            got = tuple(self.tokens[name])
            if self.ends[name] in ("stop", "length"):
                assert (got, self.ends[name]) == (output, reason)
            else:
                assert got == output[: len(got)]
        self.scheduler.check_integrity()
        stats = self.cache.stats()
        assert stats.free + stats.cached == stats.total
        self.cache.reset_prefixes()
        assert self.cache.stats().free == stats.total
        assert self.scheduler.stats().running == 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.sampled_from([0, 2]),
        drafts=st.sampled_from([0, 2]),
        policy=st.sampled_from(["continuous", "continuous", "static"]),
        chunk=st.sampled_from([None, 5]),
        pages=st.sampled_from([5, 9]),
    )
    def start(self, depth, drafts, policy, chunk, pages):
        self.parts = Parts(depth, drafts, pages, policy, chunk)

    def live(self):
        return sorted(set(self.parts.specs) - set(self.parts.ends))

    def pick(self, data):
        return data.draw(st.sampled_from(self.live()))

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
    def add(self, shared, own, output, priority, stops, children, wait, host, seed):
        parts = self.parts
        before = dict(parts.specs)
        fields = {
            "prompt": STEM[:shared] + tuple((seed + i) % VOCAB for i in range(own)),
            "stop_ids": frozenset(range(stops)),
            "priority": priority,
            "deadline": None if wait is None else parts.clock() + wait,
            "needs_host_token": host,
        }
        fields["max_length"] = len(fields["prompt"]) + output
        specs = [parts.spec(seed=seed, **fields)]
        specs += [parts.spec(seed=100 + i, parent=specs[0].id, **fields) for i in range(children)]
        try:
            parts.scheduler.add(specs)
        except QueueFull:
            assert parts.scheduler.stats().waiting + len(specs) > 12
            parts.specs = before

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.parts.step()
            self.parts.scheduler.check_integrity()

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds):
        """A deadline that has passed ends its sequence with the next step."""
        parts = self.parts
        parts.clock.advance(seconds)
        late = [name for name in self.live() if (parts.specs[name].deadline or 1e9) <= parts.clock()]
        parts.step()
        assert all(name in parts.ends for name in late)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data):
        name = self.pick(data)
        assert self.parts.scheduler.finish(name, "abort")
        assert not self.parts.scheduler.finish(name, "abort")
        self.parts.step()
        assert self.parts.ends[name] == "abort"

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def pause(self, data):
        assert self.parts.scheduler.pause(self.pick(data))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def resume(self, data):
        assert self.parts.scheduler.resume(self.pick(data))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fork(self, data):
        """The child goes on as a sequence whose output begins with its parent's."""
        parts = self.parts
        name = self.pick(data)
        source = parts.specs[name]
        fields = {field: getattr(source, field) for field in source.__struct_fields__}
        child = SequenceSpec(**fields | {"id": f"r{len(parts.specs)}", "parent": None, "deadline": None})
        try:
            parts.scheduler.fork(name, child)
        except (ValueError, QueueFull):
            return
        parts.specs[child.id] = child
        parts.tokens[child.id] = list(parts.tokens.get(name, ()))

    @rule(launched=st.booleans())
    def fail(self, launched):
        """A step raises, at launch or when it should retire; those it touched end with an error."""
        parts = self.parts
        if launched and parts.device.flying:
            parts.scheduler.fail(parts.device.lose(), "it broke")
        elif not launched:
            plan = parts.scheduler.schedule()
            if plan is None:
                return
            parts.scheduler.fail(plan.id, "it broke")
            parts.take(parts.scheduler.commit(None))
            assert all(parts.ends.get(row.id) == "error" for row in plan.rows)

    @invariant()
    def is_whole(self):
        if hasattr(self, "parts"):
            self.parts.scheduler.check_integrity()
            self.parts.take(self.parts.scheduler.commit(None))

    def teardown(self):
        if hasattr(self, "parts"):
            self.parts.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=1000 if FULL else 80,
    stateful_step_count=50 if FULL else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("depth", [0, 2])
def test_a_thousand_random_cancels_leak_nothing(depth):
    random = Random(depth)
    parts = Parts(depth, drafts=2, pages=9, max_queue=64)
    cancelled = 0
    while cancelled < 1000:
        live = sorted(set(parts.specs) - set(parts.ends))
        while len(live) < 12:
            spec = parts.spec(
                prompt=(*STEM[: random.randrange(1, 30)], len(parts.specs) % VOCAB), seed=len(parts.specs)
            )
            parts.scheduler.add([spec])
            live.append(spec.id)
        assert parts.scheduler.finish(random.choice(live), "abort")
        cancelled += 1
        parts.step()
    parts.finish()
    assert list(parts.ends.values()).count("abort") == 1000
