"""The fused sampler against the suite that every sampler is held to: on a CUDA device, and on a CPU under Triton's
interpreter, which is chosen when a kernel is defined and so has a process of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from msgspec.structs import replace

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed
from pegboard.testing import SamplerSuite
from pegboard.testing.conformance import Candidate
from pegboard_sampling.fused import wide
from pegboard_sampling.fused.sampler import FusedSampler

SUPPORT: list[tuple[list[float], dict[str, Any], set[int]]] = [
    ([1.0, 3.0, 3.0, 3.0, 0.0], {"top_k": 2}, {1, 2}),
    ([1.0, 3.0, 2.0, 2.0, 2.0], {"top_k": 3}, {1, 2, 3}),
    ([0.0] * 100, {"top_k": 70}, set(range(70))),
    ([0.0] * 100, {"top_p": 0.51}, set(range(51))),
    ([0.0] * 300, {"top_k": 4, "top_p": 0.3}, {0, 1}),
    ([0.0] * 300, {"top_k": 100, "top_p": 0.302}, set(range(31))),
    ([0.0, 1.0] * 50, {"top_k": 70}, {*range(1, 100, 2), *range(0, 40, 2)}),
    ([0.0] * 8, {"top_p": 0.01}, {0}),
    ([2.0, 0.0, 2.0], {"min_p": 1.0}, {0, 2}),
    ([0.0, -math.inf, 0.0, -math.inf], {"top_p": 0.999}, {0, 2}),
    ([0.0, -math.inf, 0.0, -math.inf] * 20, {"top_k": 66}, set(range(0, 80, 2))),
    ([-math.inf, -math.inf, -50.0], {"top_k": 2, "top_p": 0.1}, {2}),
    # More than are compared with each other at last
    ([0.0] * 1400, {"top_p": 0.5004}, set(range(701))),
    ([0.0, 1.0] * 700, {"top_k": 750}, {*range(1, 1400, 2), *range(0, 100, 2)}),
    ([1.0, 0.0, 0.0] * 600, {"top_k": 800, "top_p": 0.8938}, {*range(0, 1800, 3), *(i for i in range(9) if i % 3)}),
    ([-i / 100 for i in range(1500)], {"top_p": 0.9}, set(range(231))),
    ([0.0] * 1300, {"top_k": 64}, set(range(64))),
    ([0.0] * 1300, {"min_p": 0.5}, set(range(1300))),
]

#: Kinds that count no tokens, so that the best with its noise is tried: at low top-p most first tries fail.
UNCOUNTED: list[dict[str, Any]] = [
    {"top_p": 0.02},
    {"top_p": 0.1, "temperature": 1.7},
    {"top_p": 0.3},
    {"top_p": 0.6, "min_p": 0.2},
    {"top_p": 0.9, "temperature": 0.4, "presence_penalty": 1.0, "output": (1, 5)},
    {"top_p": 0.99999, "logit_bias": {3: 2.0}},
    {"min_p": 0.3},
]

FULL = bool(os.environ.get("PEGBOARD_FULL"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Interpreted(FusedSampler):
    @classmethod
    def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]:
        return FusedSampler.refusals(_on_cuda(need), options)

    @classmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self:
        return cls(need, interpreted=True)


def _on_cuda(need: SamplerNeed) -> SamplerNeed:
    return replace(need, device=DeviceFacts(type="cuda", capability=(8, 0)))


if INTERPRETED:
    # The interpreter takes all threads of a program at once, but its turns one by one
    wide._PART_WARPS = 4

    # numpy warns of infinities that a device computes and drops
    @pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
    class TestInterpreted(SamplerSuite):
        part = Interpreted
        grid = "normal" if FULL else "small"
        dtypes = ("float32", "float16") if FULL else ("float32",)
        claims = ("verify", "trees", "batch_invariant")
        exempt = {
            "test_distribution": "takes thousands of launches: held on a CUDA device",
            "test_exact_support": "takes thousands of launches: held on a CUDA device, here test_support",
        }
        test_distribution = None
        test_exact_support = None

        @pytest.mark.parametrize(("row", "kind", "allowed"), SUPPORT, ids=[str(kind) for _, kind, _ in SUPPORT])
        def test_support(self, candidate: Candidate, row: list[float], kind: dict[str, Any], allowed: set[int]) -> None:
            """What may be chosen, as its log-probabilities tell: equal logits, so who takes part is a matter of ids."""
            one = self.opening(0, **kind, logprobs=len(row), logprobs_mode="processed")
            sampler = self.make(candidate, [one], len(row))
            found = self.sample(sampler, torch.tensor([row], device=self.device), [0], [3]).logprobs
            assert found is not None
            told = zip(found.top_ids[0].tolist(), found.top_values[0].tolist(), strict=True)
            assert {id for id, value in told if value > -math.inf} == allowed

        @pytest.mark.parametrize(
            "form", ["tied", *(pytest.param(form, marks=pytest.mark.full) for form in ("flat", "falling"))]
        )
        def test_the_best_that_takes_part(self, candidate: Candidate, form: str) -> None:
            """More than one part of a row, and rows that fail among the others."""
            vocab, count = 4500, len(UNCOUNTED)
            openings = [self.opening(slot, **kind) for slot, kind in enumerate([*UNCOUNTED, *[{"top_p": 0.5}] * 2])]
            for position in range(5 if FULL else 1):
                sampler = self.make(candidate, openings, vocab)
                logits = self.logits(len(openings), vocab, "float32", seed=position, size=1.0)
                if form == "flat":
                    logits = torch.zeros_like(logits)
                elif form == "tied":
                    logits = (logits * 2).round()
                else:
                    logits -= 2 * torch.arange(1.0, vocab + 1, device=self.device).log()
                logits[0::3, :2000] = -math.inf
                logits[count], logits[count + 1, 4200] = -math.inf, math.nan
                ids = self.sample(sampler, logits, range(len(openings)), [position] * len(openings)).ids.tolist()
                assert ids[count:] == [-2, -1]
                self.hold_choices(ids[:count], logits[:count], openings[:count], position, "float32")

        def test_the_edge_of_what_takes_part(self, candidate: Candidate) -> None:
            """Levels of much the same weight, at the depths that the pass over the logits weighs down to, spread over
            two chunks: what it knows of a row ends between them, or at one."""
            counts, vocab = (1, 55, 148, 300), 4500
            levels = [torch.full((n,), x) for n, x in zip(counts, (0.0, -4.0, -5.0, -7.0), strict=True)]
            levels += [torch.full((vocab - sum(counts),), -math.inf)]
            row = torch.cat(levels)[torch.randperm(vocab, generator=torch.Generator().manual_seed(3))]
            # In the midst of each level, of the third with min-p above its edge, and between the first two
            kinds = [{"top_p": 0.15}, {"top_p": 0.45}, {"top_p": 0.75}, {"top_p": 0.96}, {"top_p": 0.75, "min_p": 0.01}]
            kinds += [{"top_p": 1 / float(row.exp().sum())}]
            openings = [self.opening(slot, **kind) for slot, kind in enumerate(kinds * (20 if FULL else 2))]
            sampler = self.make(candidate, openings, vocab)
            logits = row.to(self.device).expand(len(openings), -1).contiguous()
            ids = self.sample(sampler, logits, range(len(openings)), [5] * len(openings)).ids.tolist()
            self.hold_choices(ids, logits, openings, 5, "float32")

        def test_half_of_equal_logits(self, candidate: Candidate) -> None:
            """Four of eight take part: what lies ahead of the fifth weighs top-p exactly."""
            openings = [self.opening(slot, top_p=0.5) for slot in range(8)]
            sampler = self.make(candidate, openings, 8)
            ids = self.sample(sampler, torch.zeros(8, 8, device=self.device), range(8), [8] * 8).ids.tolist()
            assert set(ids) == {0, 1, 2, 3}


@pytest.mark.gpu
class TestOnCuda(SamplerSuite):
    part = FusedSampler
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")
    claims = ("verify", "trees", "batch_invariant")


@pytest.mark.supports("Sampling", "every parameter in Triton, without sorting the vocabulary (part fused)")
@pytest.mark.skipif(INTERPRETED, reason="runs in itself")
@pytest.mark.long
def test_under_the_interpreter(run_interpreted: Callable[[Path], str]) -> None:
    run_interpreted(Path(__file__))
