from __future__ import annotations

import random

import pytest
import shortest_job_first
from pydantic import ValidationError
from shortest_job_first.options import Options
from shortest_job_first.scheduler import ShortestJobFirst

from pegboard import Registry, SamplingParams
from pegboard.contracts.attention import KVLayout
from pegboard.contracts.cache import CacheGroup, CacheNeed
from pegboard.contracts.scheduler import SchedulerNeed, SequenceSpec
from pegboard.testing import FakeClock, SchedulerSuite, SimulatedDevice, isolated_engine
from pegboard.testing.simulated import run_all

PART = shortest_job_first.pegboard_parts()[0]
PAGED = Registry.discover().get("cache", "paged")
GROUP = CacheGroup(index=0, kind="full", layers=(0,), layout=KVLayout(name="none", tensors=()), page_bytes=1)


class TestShortestJobFirst(SchedulerSuite):
    """The contract: every policy must give each sequence the tokens that it gets alone."""

    part = PART
    claims = ("preemption",)


def job(id: str, prompt: int, output: int, arrival: float = 0.0) -> SequenceSpec:
    tokens = tuple(range(1, prompt + 1))
    return SequenceSpec(
        id=id, prompt=tokens, sampling=SamplingParams(), seed=0, max_length=prompt + output, arrival=arrival
    )


def ends(jobs: list[SequenceSpec], **options: float) -> list[str]:
    """In which order jobs end on a device of one row."""
    need = CacheNeed(groups=(GROUP,), page_size=16, budget_bytes=40, max_rows=1, max_length=256)
    cache = PAGED.load().create(need, PAGED.options({}))
    limits = SchedulerNeed(max_rows=1, max_step_tokens=64, max_queue=100, max_length=256, depth=0)
    scheduler = ShortestJobFirst.create(limits, Options(**options), cache=cache, clock=FakeClock())
    scheduler.add(jobs)
    found: list[str] = []

    def note() -> None:
        found.extend(spec.id for spec in jobs if spec.id not in found and not scheduler.is_live(spec.id))

    run_all(scheduler, SimulatedDevice(need, cache.pages, vocab=64), 0, each=note)
    note()
    return found


def test_the_shortest_job_ends_first() -> None:
    assert ends([job("long", 4, 60), job("short", 4, 3), job("middle", 4, 20)]) == ["short", "middle", "long"]


def test_what_output_costs_decides_between_reading_and_writing() -> None:
    jobs = [job("reads", 60, 2), job("writes", 4, 20)]
    assert ends(jobs, output_cost=8.0) == ["reads", "writes"]
    assert ends(jobs, output_cost=1.0) == ["writes", "reads"]


def test_ageing_lets_a_long_job_pass_later_short_ones() -> None:
    jobs = [job("long", 4, 60, arrival=0.0), *(job(f"short {i}", 4, 3, arrival=float(i)) for i in range(6))]
    assert ends(jobs, ageing=0.0)[-1] == "long"
    # It costs 456 more: with 150 a second that is 3.04 seconds, so those of 4 and 5 come after it
    assert ends(jobs, ageing=150.0) == ["short 0", "short 1", "short 2", "short 3", "long", "short 4", "short 5"]


def test_the_mean_wait_is_least() -> None:
    """Against first come, first served: the same scheduler where age outweighs all."""
    draw = random.Random(3)
    jobs = [job(f"j{i}", 4, draw.choice([2, 5, 40]), arrival=i * 1e-3) for i in range(12)]
    length = {spec.id: spec.max_length for spec in jobs}

    def mean_end(order: list[str]) -> float:
        total, sum_of_ends = 0, 0
        for id in order:
            total += length[id]
            sum_of_ends += total
        return sum_of_ends / len(order)

    in_order = ends(jobs, ageing=1e9)
    assert in_order == [spec.id for spec in jobs]
    assert mean_end(ends(jobs)) < 0.7 * mean_end(in_order)


@pytest.mark.parametrize("wrong", [{"ageing": -1.0}, {"aging": 1.0}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Options(**wrong)


def test_an_engine_uses_it(model: str) -> None:
    with isolated_engine(model, plugins=[shortest_job_first], scheduler="shortest-job-first") as engine:
        assert engine.plan.parts["scheduler"].name == "shortest-job-first"
        greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        together = engine.generate([list(range(3, 40)), [5, 6]], greedy)
        [alone] = engine.generate([[5, 6]], greedy)
    assert together[1].token_ids == alone.token_ids
