"""`pegboard train-heads`: what is learnt from is what transformers says of the model, and drafts get better by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard import ConfigError, Engine, SamplingParams
from pegboard.cli.main import main
from pegboard.heads import HeadsSettings, train_heads
from pegboard.heads.collecting import NAME, Collected, collecting_plugin
from pegboard.heads.prompts import built_in
from pegboard.models.llama import Llama
from pegboard.testing.tiny import tiny_model

SMALL: dict[str, Any] = {"drafts": 2, "texts": 24, "tokens": 32, "epochs": 20, "batch": 4, "rate": 1e-2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that mostly looks at its last token, as random layers do not: its texts have something in common."""
    path = tiny_model(tmp_path_factory.mktemp("target") / "model", vocab_size=300, num_hidden_layers=2)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.02
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("asked") / "prompts.txt"
    file.write_text("\n".join(built_in()[:9]) + "\n\n", encoding="utf-8")
    return file


def test_what_is_collected_is_what_the_model_says(target: Path) -> None:
    """Prompts in chunks, several beside each other, one of a single token; sampled texts have greedy choices too."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    collected, prompts = Collected(), [[5], [6, 7, 8], [(3 * i) % 290 + 3 for i in range(40)]]
    scheduler = {"use": "continuous", "options": {"chunk": 7}}
    with Engine(
        target, device="cpu", plugins=[collecting_plugin(collected)], speculator=NAME, scheduler=scheduler
    ) as engine:
        sampling = SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True)
        answers = [output.raise_for_error() for output in engine.generate(prompts, sampling)]
        assert engine.stats().speculation is not None
        assert engine.stats().speculation.steps == 0
    texts = collected.texts(4, "cpu")
    assert sorted(text.ids.tolist() for text in texts) == sorted(
        [*answer.prompt_token_ids, *answer.token_ids] for answer in answers
    )
    differs = False
    for text in texts:
        with torch.inference_mode():
            states = oracle.model(text.ids[None]).last_hidden_state[0, :-1]
            torch.testing.assert_close(text.hidden, states, rtol=1e-3, atol=1e-3)
            assert text.greedy.equal(oracle.lm_head(states).argmax(-1))
        differs |= not text.greedy.equal(text.ids[1:])
    assert differs
    assert len(collected.texts(13, "cpu")) == 1


@pytest.mark.supports("Decoding", "training heads for speculation on a model's own texts (pegboard train-heads)")
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_training_raises_acceptance(target: Path, asked: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "heads"
    report = train_heads(
        target, out, kind=kind, prompts=asked, settings=HeadsSettings(**SMALL), device="cpu", say=lambda _line: None
    )
    assert report.last_loss < 0.7 * report.first_loss
    assert report.after.by_place[0] > report.before.by_place[0] + 0.2
    assert report.after.mean_length > report.before.mean_length + 0.2
    assert report.held_out_prompts == 1
    assert report.steps == 20 * 6
    weights = load_file(out / "model.safetensors")
    assert {part.dtype for part in weights.values()} == {torch.bfloat16}
    assert sum(part.numel() for part in weights.values()) == report.parameters
    assert (out / "model.safetensors").stat().st_size == report.bytes_written
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["training"]["after"]["by_place"] == list(report.after.by_place)
    assert config["training"]["drafts"] == 2


def test_training_without_a_rate_changes_nothing(target: Path, asked: Path, tmp_path: Path) -> None:
    """The numbers before and after are measured alike."""
    settings = HeadsSettings(**{**SMALL, "rate": 0.0, "epochs": 1})
    report = train_heads(
        target, tmp_path / "heads", kind="eagle", prompts=asked, settings=settings, device="cpu", say=lambda _line: None
    )
    assert report.before == report.after


def test_a_text_is_read_instead(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(built_in()), encoding="utf-8")
    out = tmp_path / "heads"
    shape = [
        "--text",
        str(text),
        "--length",
        "32",
        "--tokens",
        "8",
        "--epochs",
        "1",
        "--drafts",
        "1",
        "--device",
        "cpu",
    ]
    assert main(["train-heads", str(target), "--kind", "medusa", "--out", str(out), *shape, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_learnt"] > 1000
    assert told["tokens_learnt"] % 32 == 0
    assert len(told["after"]["by_place"]) == 1
    assert load_file(out / "model.safetensors").keys() == {"0.0.linear.weight", "0.0.linear.bias"}


def test_settings_that_are_none() -> None:
    with pytest.raises(ConfigError) as caught:
        HeadsSettings(batch=0, epochs=2.5, rate=-1.0)  # type: ignore[arg-type]
    assert len(caught.value.reasons) == 3


def test_what_is_broken_off_leaves_an_empty_folder(
    target: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that looks like heads, and nothing in the way of trying again, with a path that is text."""

    def say(line: str) -> None:
        if line.startswith("epoch"):
            raise KeyboardInterrupt

    out, small = tmp_path / "out", HeadsSettings(texts=3, tokens=8, epochs=1, drafts=1)
    with pytest.raises(KeyboardInterrupt):
        train_heads(target, out, kind="medusa", prompts=asked, settings=small, device="cpu", say=say)
    assert not list(out.iterdir())
    train_heads(target, str(out), kind="medusa", prompts=asked, settings=small, device="cpu")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]


def test_so_many_pieces_of_a_text(target: Path, tmp_path: Path) -> None:
    """The longest that the context holds, though answers are measured, too."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(built_in() * 4), encoding="utf-8")
    settings = HeadsSettings(texts=2, length=500, tokens=100, epochs=1, drafts=1)
    report = train_heads(target, tmp_path / "out", kind="medusa", text=text, settings=settings, device="cpu")
    assert report.tokens_learnt == 2 * 500


def test_what_cannot_be_trained(target: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(word: str, model: Path = target, **asked_for: Any) -> None:
        settings = {"kind": "medusa", "device": "cpu", "out": tmp_path / "out", **asked_for}
        with pytest.raises(ConfigError, match=word):
            train_heads(model, **settings)

    refused("no speculator 'ngram' has heads to train; those that do: eagle, medusa", kind="ngram")
    refused("not empty", out=asked.parent)
    refused("no folder that may be written to", out=asked / "below a file")
    refused("do not fit into a context of 512", settings=HeadsSettings(tokens=600))
    refused("pieces have 5 to 511", text=asked, settings=HeadsSettings(length=4))
    refused("pieces have 5 to 511", text=asked, settings=HeadsSettings(length=512))
    refused("name one of them", prompts=asked, text=asked)
    refused("can't be read", prompts=tmp_path / "nowhere")
    one = tmp_path / "one.txt"
    one.write_text("Only this.\n", encoding="utf-8")
    refused("two different prompts", prompts=one)
    refused("two pieces of 256", text=one)
    one.write_text("\n \n", encoding="utf-8")
    refused("no prompt", prompts=one)
    silent = tiny_model(tmp_path / "silent", num_hidden_layers=1, tokenizer=False)
    refused("trained on texts", silent)
    monkeypatch.setattr(Llama, "shares_ends", False)
    refused("shares neither", prompts=asked)
    assert not (tmp_path / "out").exists()


def test_prompts_are_different() -> None:
    assert len(set(built_in())) == len(built_in()) == 300
