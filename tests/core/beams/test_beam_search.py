"""Beam search through an engine: the texts, and their scores, are those of transformers' `generate(num_beams=...)`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pegboard import Engine, SamplingParams
from pegboard.testing.tiny import tiny_model


def prompt(seed: int, length: int = 9) -> list[int]:
    return torch.randint(3, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def expected(
    model: Any, ids: list[int], sampling: SamplingParams, eos: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """The n best texts and their scores, EOS included."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            num_beams=sampling.num_beams,
            num_return_sequences=sampling.n,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    texts = []
    for row in found.sequences[:, len(ids) :].tolist():
        ends = [place for place, token in enumerate(row) if token in eos]
        texts.append(row[: ends[0] + 1] if ends else row)
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def check(engine: Engine, model: Any, ids: list[int], sampling: SamplingParams, eos: tuple[int, ...] = (2,)) -> None:
    output = engine.generate([ids], sampling)[0].raise_for_error()
    right = expected(model, ids, sampling, eos)
    assert [list(c.token_ids) for c in output.completions] == [text for text, _ in right]
    assert [c.score for c in output.completions] == pytest.approx([score for _, score in right], rel=1e-5, abs=1e-5)
    for completion in output.completions:
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in eos else "length")


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Probabilities so even that EOS comes up among the candidates now and then."""
    return tiny_model(tmp_path_factory.mktemp("flat") / "m", std=0.08, seed=3, vocab_size=64, tokenizer=False)


@pytest.fixture(scope="module")
def model(flat: Path) -> Any:
    return load(flat)


@pytest.fixture(scope="module")
def engine(flat: Path) -> Iterator[Engine]:
    with Engine(flat, device="cpu", max_rows=32, max_length=256) as engine:
        yield engine


def short(seed: int) -> list[int]:
    return [token % 60 + 3 for token in prompt(seed)]


@pytest.mark.supports("Sampling", "beam search as transformers': penalty, early stopping, several EOS ids")
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -1.0])
def test_penalty_and_early_stopping(engine: Engine, model: Any, early: Any, penalty: float) -> None:
    ended = 0
    for seed in range(4):
        eos = (2, *range(10, 10 + 3 * seed))
        sampling = SamplingParams(
            num_beams=2 + seed, n=2, max_tokens=14, length_penalty=penalty, early_stopping=early, stop_token_ids=eos
        )
        check(engine, model, short(seed), sampling, eos)
        ended += any(len(text) < 14 for text, _ in expected(model, short(seed), sampling, eos))
    assert ended or penalty > 1  # or EOS was never seen; long texts win at a high penalty


def test_min_tokens_hold_eos_back(engine: Engine, model: Any) -> None:
    eos = (2, *range(10, 18))
    for least in (1, 4, 8):
        sampling = SamplingParams(
            num_beams=4, n=4, max_tokens=8, min_tokens=least, stop_token_ids=eos, length_penalty=-1.0
        )
        check(engine, model, short(1), sampling, eos)


def test_without_eos_a_text_is_as_long_as_asked(engine: Engine, model: Any) -> None:
    sampling = SamplingParams(num_beams=5, n=5, max_tokens=20, ignore_eos=True)
    check(engine, model, short(2), sampling, ())
    check(engine, model, short(2), SamplingParams(num_beams=5, max_tokens=1, ignore_eos=True), ())


def test_random_settings(engine: Engine, model: Any) -> None:
    random = Random(7)
    for _ in range(300 if os.environ.get("PEGBOARD_FULL") else 20):
        eos = (2, *random.sample(range(3, 64), random.choice([0, 1, 3, 6])))
        most = (64 - len(eos)) // (1 + max(1, len(eos)))
        beams = random.randint(2, min(8, most))
        tokens = random.randint(1, 25)
        sampling = SamplingParams(
            num_beams=beams,
            n=random.randint(1, beams),
            max_tokens=tokens,
            min_tokens=random.choice([0, 0, min(3, tokens)]),
            length_penalty=random.choice([-2.0, -0.5, 0.0, 0.5, 1.0, 1.7, 3.0]),
            early_stopping=random.choice([True, False, "never"]),
            stop_token_ids=eos,
        )
        check(engine, model, [random.randrange(3, 64) for _ in range(random.randint(1, 30))], sampling, eos)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral", "gemma3_text", "phi3"])
def test_architectures(tmp_path: Path, architecture: str, make_engine: Callable[..., Any]) -> None:
    """Prompts beyond a page and, for Gemma 3, beyond its window."""
    path = tiny_model(tmp_path / "m", architecture=architecture, std=0.15, tokenizer=False)
    engine, model = make_engine(path, device="cpu", max_rows=8, max_length=256), load(path)
    for seed, length in ((0, 5), (1, 71)):
        check(engine, model, prompt(seed, length), SamplingParams(num_beams=4, n=3, max_tokens=24))


@pytest.mark.model
def test_smollm2(make_engine: Callable[..., Any]) -> None:
    """Its own weights, dequantised, in transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pegboard.checkpoints.gguf import GGUFCheckpoint
    from pegboard.hub import resolve_model

    engine = make_engine("smollm2-135m-instruct", device="cpu", max_rows=8, max_length=512)
    checkpoint = GGUFCheckpoint.open(resolve_model("smollm2-135m-instruct"))
    model = LlamaForCausalLM(LlamaConfig(**dict(checkpoint.config))).eval()
    model.load_state_dict({name: checkpoint.read(name).float() for name in checkpoint.tensors()}, strict=False)
    model.tie_weights()
    checkpoint.close()
    ids = list(engine.chat_request([{"role": "user", "content": "What is the capital of France?"}]).prompt)
    check(engine, model, ids, SamplingParams(num_beams=4, n=4, max_tokens=12, early_stopping=True))
