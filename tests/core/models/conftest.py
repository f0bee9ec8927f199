"""Engines held against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Part, SamplingParams, hookimpl
from pegboard.contracts.sampler import LogprobTensors
from pegboard_sampling.torch_sampler import TorchSampler

PROMPT = (1, 17, 42, 200, 3, 99, 99, 140, 7, 56, 23)


class RecordingSampler(TorchSampler):
    """Keeps the logits that it is asked to score."""

    seen: list[torch.Tensor] = []

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> LogprobTensors:
        self.seen.append(logits.clone())
        return super().score(logits, targets, top)


class Recording:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="sampler", name="recording", factory=RecordingSampler, summary="keeps scored logits")]


def greedy(
    path: Path, prompt: Sequence[int], new: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    ids = list(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return logits, ids[len(prompt) :]


@pytest.fixture
def oracle() -> Callable[[Path, Sequence[int], int], tuple[torch.Tensor, list[int]]]:
    """oracle(path, prompt, new): logits [len(prompt), V] and `new` greedy ids, by transformers without its cache."""
    return greedy


@pytest.fixture
def check(make_engine: Callable[..., Any]) -> Callable[..., None]:
    """check(path, prompt, new, **settings): an engine's logits of the prompt, and its greedy ids, against float64.
    `twin` is what transformers reads, if that is not `path`.

    Logits reach 12. Of float32's errors the root of the mean square is what a mistake would change first: it is 5e-6 to
    9e-6 with any order of the sums, while the worst of 10,000 varies from 4e-5 to 2e-4 with the order."""

    def against(
        path: Path, prompt: Sequence[int] = PROMPT, new: int = 32, twin: Path | None = None, **settings: Any
    ) -> None:
        logits, ids = greedy(twin or path, prompt, new, torch.float64)
        RecordingSampler.seen.clear()
        engine = make_engine(path, device="cpu", plugins=[Recording()], sampler="recording", **settings)
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        engine.generate([list(prompt)], scored)[0].raise_for_error()
        ours = torch.cat(RecordingSampler.seen)
        assert ours.shape == logits.shape
        error = ours.double() - logits
        assert error.abs().max() < 2e-4
        assert error.square().mean().sqrt() < 1.5e-5
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        assert engine.generate([list(prompt)], sampling)[0].raise_for_error().token_ids == tuple(ids)

    return against


@pytest.fixture
def edit() -> Callable[..., None]:
    """edit(path, **changes): change config.json; None takes a key out, or stays as null with `keep_null`."""

    def change(path: Path, *, keep_null: bool = False, **changes: Any) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text()) | changes
        gone = [] if keep_null else [key for key, value in changes.items() if value is None]
        file.write_text(json.dumps({key: value for key, value in config.items() if key not in gone}))

    return change
