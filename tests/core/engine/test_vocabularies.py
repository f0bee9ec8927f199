"""Heads with more rows than the tokenizer has tokens, or fewer; several ids that end a text; tokens added later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pegboard import Engine, InvalidRequest, SamplingParams
from pegboard.testing.tiny import tiny_model

PROMPT = [1, 17, 42, 200, 3, 99]


def words(size: int) -> tokenizers.Tokenizer:
    """Bytes and two-letter tokens, `size` in all, the first three special; then one that was added later."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [f"{a} {b}" for a in "abcdefgh" for b in "ijklmnop"]
    pieces = ["<s>", "</s>", "<|im_end|>", *alphabet, *(pair.replace(" ", "") for pair in pairs)][: size - 1]
    merges = [tuple(pair.split(" ")) for pair in pairs if pair.replace(" ", "") in pieces]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def save(folder: Path, size: int, *, rows: int = 300, **config: Any) -> Path:
    """A model of `rows` rows with a tokenizer of `size` tokens; generation_config.json is taken away."""
    tiny_model(folder, vocab_size=rows, **config)
    words(size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))


# -- rows beyond the tokenizer


@pytest.mark.supports("Text", "padded vocabularies")
def test_rows_beyond_the_tokenizer_are_never_chosen(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    """What transformers chooses when only the tokenizer's ids may be; without that it chooses padding."""
    from transformers import AutoModelForCausalLM

    folder = save(tmp_path / "m", 262, rows=400)
    model, ids, unrestricted = AutoModelForCausalLM.from_pretrained(folder).eval(), list(PROMPT), []
    with torch.no_grad():
        for _ in range(24):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            unrestricted.append(int(logits.argmax()))
            ids.append(int(logits[:262].argmax()))
    assert max(unrestricted) >= 262
    engine = make_engine(folder, device="cpu", max_rows=4)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)
    output = engine.generate([PROMPT], greedy)[0].raise_for_error()
    assert list(output.token_ids) == ids[len(PROMPT) :]
    assert all(id < 262 for entry in output.completions[0].logprobs or () for id, _ in entry.top)
    hot = SamplingParams(temperature=5.0, max_tokens=60, ignore_eos=True, n=4, seed=1)
    for completion in engine.generate([PROMPT], hot)[0].raise_for_error().completions:
        assert max(completion.token_ids) < 262


def test_ids_beyond_the_tokenizer_are_refused_in_prompts_and_are_no_text(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(save(tmp_path / "m", 262, rows=400), device="cpu", max_rows=1)
    with pytest.raises(InvalidRequest, match="holds 262, must be token ids from 0 to 261"):
        engine.submit([1, 262])
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        engine.submit([1], SamplingParams(stop_token_ids=(399,)))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.submit([1], SamplingParams(logit_bias={399: 1.0}))
    tokenizer = engine._admission.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode([65, 399, 66]) == tokenizer.decode([65, 66])
    assert tokenizer.token_text(399) == ""


def test_tokens_that_were_added_later(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(save(tmp_path / "m", 262), device="cpu", max_rows=1)
    forced = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={261: 1000.0}, ignore_eos=True)
    output = engine.generate("ai <tool>", forced)
    assert output.prompt_token_ids[-1] == 261
    assert output.token_ids == (261,) * 3
    assert output.text == "<tool>" * 3


# -- a tokenizer beyond the rows


def test_a_text_with_tokens_that_the_model_lacks_is_refused(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(save(tmp_path / "m", 280, rows=270), device="cpu", max_rows=1)
    with pytest.raises(InvalidRequest, match=r"'<tool>', which is token 279 of the tokenizer; .* none beyond 269"):
        engine.submit("x <tool>")
    with pytest.raises(InvalidRequest, match="holds 270, must be token ids from 0 to 269"):
        engine.submit([270])
    fine = engine.generate(["x <tool>", "ai"], SamplingParams(max_tokens=4, ignore_eos=True))
    assert fine[0].error is not None
    assert len(fine[1].raise_for_error().token_ids) == 4


# -- what ends a text


def ends(engine: Engine) -> set[int]:
    """The ids of a few that end a text."""
    found = set()
    for id in (0, 1, 2, 5, 7):
        forced = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={id: 1000.0})
        output = engine.generate([[4, 5]], forced)[0].raise_for_error()
        if output.finish_reason == "stop":
            found.add(id)
            assert output.token_ids == (id,)
    return found


@pytest.mark.supports("Sampling", "several EOS ids")
@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        (7, None, {7}),
        ([2, 7], None, {2, 7}),
        (7, [1, 2], {1, 2}),
        ([5], 2, {2}),
        (7, {}, {7}),
        (None, None, {1}),
    ],
    ids=str,
)
def test_every_eos_id_ends_a_text(
    tmp_path: Path, make_engine: Callable[..., Engine], config: Any, generation: Any, wanted: set[int]
) -> None:
    """generation_config.json, as transformers' generate reads it; else config.json; else the tokenizer's own."""
    folder = save(tmp_path / "m", 262)
    edit(folder / "config.json", eos_token_id=config)
    if generation is not None:
        edit(folder / "generation_config.json", **({} if generation == {} else {"eos_token_id": generation}))
    assert ends(make_engine(folder, device="cpu", max_rows=1)) == wanted
