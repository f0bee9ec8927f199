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


def greedy(path: Path, prompt: Sequence[int], new: int) -> tuple[torch.Tensor, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
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
    """check(path, prompt, new, **settings): an engine's logits of the prompt within 1e-4, and its greedy ids. `twin` is
    what transformers reads, if that is not `path`."""

    def against(
        path: Path, prompt: Sequence[int] = PROMPT, new: int = 32, twin: Path | None = None, **settings: Any
    ) -> None:
        logits, ids = greedy(twin or path, prompt, new)
        RecordingSampler.seen.clear()
        # Models are tried on the reference parts; kernels are held against those
        parts = {"attention": "torch", "decode_attention": "torch", "ops": "torch", "sampler": "recording"}
        engine = make_engine(path, device="cpu", plugins=[Recording()], **(parts | settings))
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        engine.generate([list(prompt)], scored)[0].raise_for_error()
        ours = torch.cat(RecordingSampler.seen)
        assert ours.shape == logits.shape
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
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
