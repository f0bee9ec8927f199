"""What the fused sampler compiles to, on machines without a GPU: nothing spills, the logits are read widely, and no
kernel is so large that it takes seconds to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SamplingParams, SlotOpening, VerifyRows
from pegboard_sampling.fused.sampler import FusedSampler

CAPABILITIES = [90, pytest.param(80, marks=pytest.mark.full)]
VOCAB = 128256
#: Compiling takes time by what has to be laid out (lines of Triton's last representation) and assembled. A sorting
#: network of 1024 keys alone has 2500 lines and takes 4 s.
MOST_LINES, MOST_INSTRUCTIONS = 3000, 8000
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "noise": {},
    "few": {"top_k": 50, "top_p": 0.9},
    "wide": {"top_p": 0.9},
    "adjusted few": {"top_k": 50, "frequency_penalty": 1.0, "logit_bias": {1: 1.0}},
    "adjusted wide": {"top_p": 0.9, "presence_penalty": 1.0, "logit_bias": {1: 1.0}},
    "adjusted noise": {"presence_penalty": 1.0, "logit_bias": {1: 1.0}},
    "raw logprobs": {"logprobs": 5},
    "processed logprobs": {"logprobs": 5, "logprobs_mode": "processed", "top_k": 5},
    "many logprobs": {"logprobs": 100, "temperature": 0.0},
}


class OnHost(FusedSampler):
    """State on the host, as nothing runs."""

    def __init__(self, need: SamplerNeed, rejects: bool = False) -> None:
        super().__init__(need, rejects=rejects, interpreted=True)
        self._passes._fast = True


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind", [kind if kind in ("noise", "few", "wide") else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_nothing_spills(compile_for: Callable[..., Any], capability: int, dtype: torch.dtype, kind: str) -> None:
    device = DeviceFacts(type="cuda", capability=divmod(capability, 10))
    sampler = OnHost(SamplerNeed(device=device, vocab_size=VOCAB, slots=2, max_length=100))
    sampler.open([SlotOpening(slot=0, sampling=SamplingParams(**KINDS[kind]), seed=1, prompt=(1, 2), max_length=100)])
    rows = SampleRows(
        slots=torch.zeros(2, dtype=torch.int64), positions=torch.zeros(2, dtype=torch.int64), host_slots=(0,)
    )
    with compile_for(capability) as made:
        sampler.sample(torch.empty(2, VOCAB, dtype=dtype), rows)
    assert made[0].kernel == "read_chunks"
    if kind in ("greedy", "few", "wide"):
        assert made[0].instructions["LDG"] <= 8 + 8, "16 bytes a load: 4096 logits by 128 threads are 8, and parameters"
    hold_sizes(made)


def hold_sizes(made: list[Any]) -> None:
    assert all(one.stack == 0 for one in made)
    assert all(one.layouts.count("\n") < MOST_LINES for one in made)
    assert all(one.instructions.total() < MOST_INSTRUCTIONS for one in made)


@pytest.mark.parametrize("way", ["chain", "tree", pytest.param("rejection", marks=pytest.mark.full)])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["greedy", pytest.param("adjusted few", marks=pytest.mark.full)])
def test_nothing_spills_with_drafts(compile_for: Callable[..., Any], capability: int, kind: str, way: str) -> None:
    rejects = way == "rejection"
    device = DeviceFacts(type="cuda", capability=divmod(capability, 10))
    sampler = OnHost(SamplerNeed(device=device, vocab_size=VOCAB, slots=2, max_length=100, max_drafts=1), rejects)
    sampler.open([SlotOpening(slot=0, sampling=SamplingParams(**KINDS[kind]), seed=1, prompt=(1, 2), max_length=100)])
    rows = VerifyRows(
        slots=torch.zeros(1, dtype=torch.int64),
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        positions=torch.zeros(1, dtype=torch.int64),
        ids=torch.zeros(2, dtype=torch.int64),
        parents=torch.tensor([-1, 0]) if way == "tree" else None,
        probs=torch.zeros(2, VOCAB) if rejects else None,
        host_slots=(0,),
    )
    with compile_for(capability) as made:
        sampler.verify(torch.empty(2, VOCAB), rows)
    judges = ["refuse_drafts", "replace_refused"] if rejects else []
    assert [one.kernel for one in made] == ["lay_out_choices", "read_chunks", "choose", *judges, "keep_drafts"]
    hold_sizes(made)
