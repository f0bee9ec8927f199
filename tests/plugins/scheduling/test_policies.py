"""Who runs, and how much: the policies' own decisions, on the simulated device."""

from __future__ import annotations

from random import Random

import pytest
from pydantic import ValidationError

from pegboard.contracts.attention import KVLayout
from pegboard.contracts.cache import CacheGroup, CacheNeed
from pegboard.contracts.sampler import SamplingParams
from pegboard.contracts.scheduler import SchedulerNeed, SequenceSpec
from pegboard.testing.clock import FakeClock
from pegboard.testing.simulated import SimulatedDevice, reference, run_all
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions, StaticOptions
from pegboard_scheduling.static import StaticScheduler

VOCAB = 64


class Engine:
    def __init__(self, kind=ContinuousScheduler, options=None, *, pages=40, depth=0, **fields):
        group = CacheGroup(index=0, kind="full", layers=(0,), layout=KVLayout(name="n", tensors=()), page_bytes=1)
        need = CacheNeed(groups=(group,), page_size=16, budget_bytes=pages + 1, max_rows=4, max_length=96)
        limits = {"max_rows": 4, "max_step_tokens": 32, "max_queue": 20, "max_length": 96, "depth": depth}
        self.cache = PagedCache.create(need, PagedOptions(prefix_reuse=False))
        self.clock = FakeClock()
        self.depth = depth
        self.scheduler = kind.create(
            SchedulerNeed(**limits | fields), options or ContinuousOptions(), cache=self.cache, clock=self.clock
        )
        self.device = SimulatedDevice(need, self.cache.pages, vocab=VOCAB, random=Random(0))
        self.specs = []

    def add(self, id, length=10, output=10, **fields):
        spec = SequenceSpec(
            id=id, prompt=(len(self.specs),) * length, sampling=SamplingParams(), seed=1, max_length=length + output,
            arrival=self.clock(), **fields,
        )  # fmt: skip
        self.specs.append(spec)
        self.scheduler.add([spec])

    def step(self):
        """{id: queries} in the order of the plan."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.device.launch(plan)
        self.scheduler.commit(self.device.retire(self.depth if plan is not None else 0))
        return {row.id: row.query for row in plan.rows} if plan else {}

    def finish(self):
        outputs = run_all(self.scheduler, self.device, self.depth)
        for spec in self.specs:
            if spec.id in outputs and len(outputs[spec.id][0]) == spec.max_length - len(spec.prompt):
                assert outputs[spec.id] == reference(spec, VOCAB)
        return outputs


def test_decode_rows_come_first_and_prompts_fill_what_is_left():
    engine = Engine(max_step_tokens=16)
    engine.add("a", 16)
    assert engine.step() == {"a": 16}
    engine.add("b", 20)
    engine.add("c", 20)
    assert engine.step() == {"a": 1, "b": 15}
    assert engine.step() == {"a": 1, "b": 5, "c": 10}
    assert engine.step() == {"a": 1, "b": 1, "c": 10}


def test_chunk_limits_the_prefill_of_a_sequence():
    engine = Engine(options=ContinuousOptions(chunk=4))
    engine.add("a", 10)
    engine.add("b", 3)
    assert [engine.step() for _ in range(3)] == [{"a": 4, "b": 3}, {"b": 1, "a": 4}, {"b": 1, "a": 2}]


def test_higher_priority_runs_first_and_ageing_lifts_who_waited():
    engine = Engine(options=ContinuousOptions(ageing_seconds=10), max_rows=1)
    engine.add("running")
    engine.step()
    engine.add("batch", priority=0)
    engine.clock.advance(5)
    engine.add("soon", priority=1)
    engine.clock.advance(6)
    engine.add("late", priority=1)
    order = ["running"]
    while engine.scheduler.has_work():
        order += [name for name in engine.step() if name not in order]
    assert order == ["running", "soon", "batch", "late"]


def test_the_first_in_line_is_not_passed_by_a_smaller_one():
    engine = Engine(pages=6, max_step_tokens=96)
    engine.add("a", 40, 30)
    engine.step()
    engine.add("big", 64, 10)
    engine.add("small", 2, 2)
    seen = []
    while engine.scheduler.has_work():
        seen += [name for name in engine.step() if name not in seen]
    assert seen == ["a", "big", "small"]


def test_watermark_keeps_pages_for_rows_that_run():
    engine = Engine(options=ContinuousOptions(watermark=0.5), pages=8)
    engine.add("a", 30)
    engine.add("b", 32)
    engine.add("c", 32)
    engine.step()
    engine.step()
    assert engine.scheduler.stats().running == 2
    assert engine.scheduler.stats().waiting == 1


def test_the_latest_of_the_lowest_priority_is_preempted():
    engine = Engine(options=ContinuousOptions(watermark=0, ageing_seconds=None), pages=7, max_step_tokens=96)
    engine.add("low early", 30, 30, priority=0)
    engine.add("low late", 30, 30, priority=0)
    engine.add("high", 30, 30, priority=1)
    preempted = []
    while engine.scheduler.has_work():
        engine.step()
        running = {seq.id for seq in engine.scheduler.ledger.running}
        stats = engine.scheduler.stats()
        if stats.preempted and not preempted:
            preempted = sorted({"low early", "low late", "high"} - running)
    assert preempted == ["low late"]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [ContinuousScheduler, StaticScheduler])
def test_a_pool_of_one_longest_request_finishes_all(kind, depth):
    options = ContinuousOptions() if kind is ContinuousScheduler else StaticOptions()
    engine = Engine(kind, options, pages=6, depth=depth)
    for i in range(8):
        engine.add(f"r{i}", 20 + i, 76 - i, priority=i % 2)
    outputs = engine.finish()
    assert {name: reason for name, (_, reason) in outputs.items()} == {spec.id: "length" for spec in engine.specs}
    assert engine.scheduler.stats().preemptions_total > 0


def test_a_paused_sequence_gives_its_pages_to_those_who_wait():
    engine = Engine(pages=6)
    engine.add("a", 60, 30)
    engine.step()
    engine.step()
    engine.scheduler.pause("a")
    engine.add("b", 60, 30)
    assert [engine.step(), engine.step()] == [{"b": 32}, {"b": 28}]
    stats = engine.scheduler.stats()
    assert (stats.preemptions_total, stats.preempted, stats.paused) == (1, 0, 1), "it gave its slot back, too"
    while engine.step():
        pass
    engine.add("c", 32, 40)
    engine.step()
    engine.scheduler.pause("c")
    engine.add("d", 90, 6)
    while engine.step():
        pass
    assert [spec.id for spec in engine.specs if not engine.scheduler.finish(spec.id, "abort")] == ["b", "d"]


def test_nobody_is_preempted_while_pages_are_on_their_way_back():
    engine = Engine(options=ContinuousOptions(watermark=0), pages=6, max_step_tokens=96, depth=2)
    engine.add("a", 31, 33)
    engine.add("b", 31, 33)
    engine.add("c", 31, 33)
    engine.step()
    engine.step()  # all six pages are full, three rows fly
    engine.scheduler.finish("c", "abort")
    # a and b need a page each; those of c are fenced until the second step retires.
    assert [engine.step(), engine.step()] == [{}, {}]
    assert set(engine.step()) == {"a", "b"}
    assert engine.scheduler.stats().preemptions_total == 0
    assert engine.finish()["a"][1] == "length"


def test_a_static_batch_takes_nobody_until_all_have_ended():
    engine = Engine(StaticScheduler, StaticOptions(batch=2))
    engine.add("a", 5, 3)
    engine.add("b", 5, 6)
    engine.add("c", 5, 3)
    steps = [set(engine.step()) for _ in range(9)]
    assert steps == [{"a", "b"}] * 3 + [{"b"}] * 3 + [{"c"}] * 3


def test_limits_that_cannot_work_are_refused_and_unknown_options_too():
    need = SchedulerNeed(max_rows=0, max_step_tokens=0, max_queue=0, max_length=10)
    for kind in (ContinuousScheduler, StaticScheduler):
        assert len(kind.refusals(need, None)) == 3
    for bad in ({"chunks": 3}, {"chunk": 0}, {"watermark": 1.0}, {"ageing_seconds": 0}):
        with pytest.raises(ValidationError):
            ContinuousOptions(**bad)
    with pytest.raises(ValidationError):
        StaticOptions(batch=0)
