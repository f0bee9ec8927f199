"""Scheduling must not change outputs: every way to run the same requests gives what each gives alone."""

from __future__ import annotations

import itertools
import os
from random import Random

import pytest

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

LAYOUT = KVLayout(name="none", tensors=())
VOCAB = 24
MODELS = {
    "full": ("full",),
    "window": ("full", "window"),
    "only windows": ("window",),
    "state": ("full", "state"),
}


def make_need(kinds, *, pages, max_query, max_length=96):
    groups = tuple(
        CacheGroup(
            index=i, kind=kind, layers=(i,), layout=LAYOUT, window=20 if kind == "window" else None, page_bytes=100
        )
        for i, kind in enumerate(kinds)
    )
    return CacheNeed(
        groups=groups,
        page_size=16,
        budget_bytes=(pages + 1) * 100 * len(groups),
        max_rows=6,
        max_length=max_length,
        max_query=max_query,
    )


def make_requests(random, drafts, count):
    """Prompts with shared beginnings, children of n > 1, stops, minimal lengths, salts, priorities."""
    stems = [tuple(random.randrange(VOCAB) for _ in range(40)) for _ in range(3)]
    specs = []
    for i in range(count):
        stem = random.choice(stems)
        prompt = stem[: random.randrange(1, 40)] + tuple(
            random.randrange(VOCAB) for _ in range(random.randrange(1, 24))
        )
        spec = SequenceSpec(
            id=f"r{i}",
            prompt=prompt,
            sampling=SamplingParams(min_tokens=random.choice([0, 0, 5])),
            seed=i,
            max_length=random.randrange(len(prompt) + 1, 97),
            stop_ids=frozenset(random.sample(range(VOCAB), random.choice([0, 1, 2]))),
            priority=random.choice([0, 0, 1]),
            arrival=float(i),
            salt=random.choice(["", "tenant"]),
            needs_host_token=random.random() < 0.15,
            max_drafts=random.choice([drafts, drafts, 0]),
        )
        specs.append(spec)
        for child in range(random.choice([0, 0, 0, 2])):
            fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
            specs.append(SequenceSpec(**fields | {"id": f"r{i}c{child}", "parent": spec.id, "seed": 1000 + child}))
    return specs


WAYS = [
    pytest.param(model, depth, drafts, pages, policy, id=f"{model}-depth{depth}-drafts{drafts}-pages{pages}-{policy}")
    for model, depth, drafts, pages, policy in itertools.product(
        MODELS, (0, 1, 2, 3), (0, 3), (6, 60), ("chunk1", "chunk8", "whole", "static")
    )
    if not (model == "state" and drafts)
]


@pytest.mark.parametrize(("model", "depth", "drafts", "pages", "policy"), WAYS)
def test_outputs_are_those_of_each_sequence_alone(model, depth, drafts, pages, policy):
    for seed in range(100 if int(os.environ.get("PEGBOARD_FULL", "0")) else 1):
        random = Random(f"{model} {depth} {drafts} {pages} {policy} {seed}")
        need = make_need(MODELS[model], pages=pages, max_query=1 + drafts)
        assert PagedCache.refusals(need, PagedOptions()) == []
        cache = PagedCache.create(need, PagedOptions(prefix_reuse=random.random() < 0.8))
        limits = SchedulerNeed(
            max_rows=6, max_step_tokens=random.choice([7, 64]), max_queue=100, max_length=96, depth=depth,
            decode_width=1 + drafts,
        )  # fmt: skip
        if policy == "static":
            scheduler = StaticScheduler.create(
                limits, StaticOptions(batch=random.choice([None, 3])), cache=cache, clock=FakeClock()
            )
        else:
            options = ContinuousOptions(chunk={"chunk1": 1, "chunk8": 8, "whole": None}[policy])
            scheduler = ContinuousScheduler.create(limits, options, cache=cache, clock=FakeClock())
        device = SimulatedDevice(need, cache.pages, vocab=VOCAB, random=random)
        specs = make_requests(random, drafts, 12)
        scheduler.add(specs)
        outputs = run_all(scheduler, device, depth, each=scheduler.check_integrity)
        assert outputs == {spec.id: reference(spec, VOCAB) for spec in specs}
        stats = cache.stats()
        assert stats.free + stats.cached == stats.total
        cache.reset_prefixes()
        assert cache.stats().free == stats.total
        cache.check_integrity()
