"""The first-party speculators against the suite that every speculator is held to, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pegboard import ConfigError, Engine, SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.testing import SpeculatorSuite, tiny_model
from pegboard.testing.conformance import Candidate
from pegboard.testing.speculator import TARGET
from pegboard_sampling.speculation.draft_model import DraftModelSpeculator
from pegboard_sampling.speculation.options import DraftModelOptions


class TestNGram(SpeculatorSuite):
    part = "ngram"
    options = {"drafts": 5, "min_n": 2, "max_n": 3}

    def reference(self, history: Sequence[int], drafts: int) -> Sequence[int]:
        """Longer suffixes first, then later places; a copy may read what it has written."""
        for length in (3, 2):
            suffix = tuple(history[-length:])
            if len(suffix) < length:
                continue
            for end in range(len(history) - 2, length - 2, -1):
                if tuple(history[end - length + 1 : end + 1]) == suffix:
                    text = list(history)
                    for place in range(drafts):
                        text.append(text[end + 1 + place])
                    return text[len(history) :]
        return []


class TestNGramOfOneToken(TestNGram):
    options = {"drafts": 2, "min_n": 1, "max_n": 1}

    def reference(self, history: Sequence[int], drafts: int) -> Sequence[int]:
        places = [place for place in range(len(history) - 1) if history[place] == history[-1]]
        if not places:
            return []
        text = list(history)
        for place in range(drafts):
            text.append(text[places[-1] + 1 + place])
        return text[len(history) :]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the suite's target wants it."""
    path = tmp_path_factory.mktemp("draft") / "model"
    return tiny_model(path, vocab_size=64, max_position_embeddings=96, num_hidden_layers=2, tokenizer=False)


class TestDraftModel(SpeculatorSuite):
    part = DraftModelSpeculator
    claims = ("probs",)
    foreign = (("vocabulary", replace(TARGET, vocab_size=100)),)

    @pytest.fixture
    def candidate(self, drafter: Path) -> Candidate:
        # In float32: with few bits a history's drafts depend on how it was cut into steps
        options = DraftModelOptions(model=str(drafter), drafts=3, candidates=5, dtype="float32")
        return Candidate(DraftModelSpeculator, options)


@pytest.mark.gpu
class TestNGramOnCuda(TestNGram):
    device = "cuda"


@pytest.mark.gpu
class TestDraftModelOnCuda(TestDraftModel):
    device = "cuda"


def refused(target: Path, word: str, length: int = 90, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(target, device="cpu", max_length=length, speculator={"use": "draft_model", "options": options}).close()
    assert "speculator" in str(caught.value)
    assert word in str(caught.value)


def test_draft_models_that_do_not_fit(tiny_path: Path, drafter: Path, tmp_path: Path) -> None:
    refused(tiny_path, "vocabulary of 64", model=str(drafter))
    short = tiny_model(tmp_path / "short", max_position_embeddings=100, tokenizer=False)
    refused(tiny_path, "100 tokens the model was made for", 101, model=str(short))
    refused(tiny_path, "nowhere", model=str(tmp_path / "nowhere"))
    refused(tiny_path, "model: ", drafts=3)
    need = replace(SpeculatorSuite.need(), device=DeviceFacts(type="cuda", index=0))
    [reason] = DraftModelSpeculator.refusals(need, DraftModelOptions(model=str(drafter), device="cpu"))
    assert "waiting" in reason


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_is_the_target_is_always_right(tiny_path: Path, verification: str, temperature: float) -> None:
    """Every step keeps all drafts and one token more: 24 tokens in 1 + 5 steps."""
    settings: dict[str, Any] = {
        "speculator": {"use": "draft_model", "options": {"model": str(tiny_path), "drafts": 4, "candidates": 211}},
        "sampler": {"use": "torch", "options": {"verification": verification}},
        "adapt_drafts": False,
    }
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=26, ignore_eos=True)
    with Engine(tiny_path, device="cpu", **settings) as engine:
        output = engine.generate([[5, 6, 7]], sampling)[0].raise_for_error()
        found = engine.stats().speculation
    assert len(output.token_ids) == 26
    assert found is not None
    assert found.proposed == found.accepted == (5, 5, 5, 5)
    assert found.mean_length == 5.0
