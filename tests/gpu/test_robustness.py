"""What a GPU engine must outlive: long random traffic, NaNs out of a kernel, parts that raise in mid-step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pegboard import Part, SamplingParams, hookimpl
from pegboard.contracts.sampler import SampleOutput, SampleRows
from pegboard.request import Request
from pegboard.testing.tiny import tiny_model
from pegboard_attention.flash_decoding import FlashDecoding
from pegboard_sampling.fused.sampler import FusedSampler

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_rows": 12,
    "max_step_tokens": 96,
    "max_length": 448,
    "kv_memory": "2MiB",  # few enough pages for preemption
    "page_size": 64,
}
STEPS = 10_000 if os.environ.get("PEGBOARD_FULL") else 1_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "m", std=0.4, seed=5, head_dim=64)


def requests(random: Random) -> Iterator[Request]:
    while True:
        sampling = SamplingParams(
            temperature=random.choice([0.0, 0.8, 1.1]),
            top_k=random.choice([0, 5, 40]),
            top_p=random.choice([1.0, 0.9]),
            frequency_penalty=random.choice([0.0, 0.0, 0.5]),
            logprobs=random.choice([None, None, 2]),
            seed=random.randrange(1 << 30),
            max_tokens=random.randint(1, 120),
            ignore_eos=True,
        )
        prompt = [random.randrange(3, 200) for _ in range(random.choice([1, 2, 17, 64, 150]))]
        yield Request(prompt=prompt, sampling=sampling)


class Steps:
    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def pegboard_step_done(self, event: Any) -> None:
        self.count += 1


def test_long_random_traffic(path: Path, make_engine: Callable[..., Any]) -> None:
    """No memory is lost, nothing drifts: a request gets the tokens in the end that it got at the start."""
    steps, random = Steps(), Random(8)
    engine = make_engine(path, watchers=[steps], **SETTINGS)
    sample = [Request(prompt=[7, 8, 9, 10 + i], sampling=GREEDY) for i in range(4)]
    source, held, first = requests(random), [], None
    while steps.count < STEPS:
        asked = [next(source) for _ in range(60)]
        handles = [engine.submit(request) for request in asked]
        for handle in random.sample(handles, 6):
            handle.abort()
        for handle, request in zip(handles, asked, strict=True):
            found = handle.result(timeout=120).completions[0]
            assert found.error is None
            if found.finish_reason != "abort":
                assert len(found.token_ids) == request.sampling.max_tokens
        told = [engine.generate(Request(prompt=r.prompt, sampling=r.sampling, salt=str(steps.count))) for r in sample]
        ids = [output.raise_for_error().token_ids for output in told]
        first = first or ids
        assert ids == first
        held.append(torch.cuda.memory_allocated())
    engine._phases.scheduler.check_integrity()
    assert engine._phases.scheduler.stats().running == 0
    half = len(held) // 2
    # Graphs of new shapes and the sampler's tables come at the start
    assert max(held[half:]) - max(held[:half]) <= 8 << 20


class Poisoned(FlashDecoding):
    """A decode kernel that gives NaN to rows of a slot."""

    slot = torch.tensor(-1)

    def plan(self, rows: Any, layer: Any, workspace: Any) -> Any:
        return super().plan(rows, layer, workspace), rows

    def forward(self, q: Any, k: Any, v: Any, cache: Any, plan: Any, sinks: Any = None) -> Any:
        made, rows = plan
        mixed = super().forward(q, k, v, cache, made, sinks)
        struck = (rows.row_slot == type(self).slot)[:, None, None]
        return torch.where(struck, float("nan"), mixed)


class Raising(FusedSampler):
    """Raises in the step after `armed` was set."""

    capturable = False
    armed = False

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampleOutput:
        if type(self).armed:
            type(self).armed = False
            raise RuntimeError("the kernel was not launched")
        return super().sample(logits, rows)


class Plugin:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        parts = {"attention": Poisoned, "sampler": Raising}
        return [Part(role=role, name="bad", factory=part, summary="") for role, part in parts.items()]  # type: ignore[arg-type]


@pytest.mark.supports("On a GPU", "a NaN fails its request only")
def test_nan_fails_its_row_only(path: Path, make_engine: Callable[..., Any]) -> None:
    """In recorded steps as well: the slot that is struck is the device's to know."""
    Poisoned.slot = torch.tensor(-1, device="cuda")
    engine = make_engine(path, plugins=[Plugin()], decode_attention="bad", **SETTINGS | {"max_rows": 4})
    prompts = [[5, 6, 7 + i] for i in range(4)]
    good = [output.raise_for_error().token_ids for output in engine.generate(prompts, GREEDY)]
    for _ in range(2):
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == good
    Poisoned.slot.fill_(1)
    struck = engine.generate(prompts, GREEDY)
    failed = [index for index, output in enumerate(struck) if output.error is not None]
    assert len(failed) == 1
    assert "NaN" in str(struck[failed[0]].error)
    assert [o.token_ids for i, o in enumerate(struck) if i not in failed] == [
        g for i, g in enumerate(good) if i not in failed
    ]
    Poisoned.slot.fill_(-1)
    again = engine.generate([Request(prompt=p, sampling=GREEDY, salt="again") for p in prompts])
    assert [output.raise_for_error().token_ids for output in again] == good


def test_a_part_that_raises_fails_its_step_only(path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(path, plugins=[Plugin()], sampler="bad", **SETTINGS)
    prompts = [[5, 6, 7 + i] for i in range(4)]
    good = [output.raise_for_error().token_ids for output in engine.generate(prompts, GREEDY)]
    Raising.armed = True
    assert any("was not launched" in str(output.error) for output in engine.generate(prompts, GREEDY))
    again = engine.generate([Request(prompt=p, sampling=GREEDY, salt="again") for p in prompts])
    assert [output.raise_for_error().token_ids for output in again] == good
