"""Folders without a tokenizer.json: read as transformers reads them where the class is known, else refused with what to
do about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import AutoTokenizer

from pegboard.checkpoints.safetensors import SafetensorsCheckpoint
from pegboard.errors import CheckpointError
from pegboard.text import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "  The quick brown fox  ",
    "It's 12345 o'clock, isn't it? I'LL",
    "line\n\n\ttabs\r\n한국어 日本語 e\u0301 😀",
    "a<tool call>b <|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture
def write(tmp_path: Path, make_tokenizer: Callable[..., Tokenizer]) -> Callable[..., Path]:
    """write(tokenizer_class, **tokenizer_config): a folder with vocab.json and merges.txt, as a model's is."""

    def make(name: str | None, **config: Any) -> Path:
        model = json.loads(make_tokenizer("byte_level").backend.to_str())["model"]
        added = ["</s>", "<|im_start|>", "<|im_end|>", "<tool call>"]
        pieces = [piece for piece in model["vocab"] if piece not in (*added, "<s>")]
        (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
        merges = "".join(f"{' '.join(merge)}\n" for merge in model["merges"])
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
        described = {
            str(len(pieces) + i): {
                "content": token,
                "special": token != "<tool call>",
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for i, token in enumerate(added)
        }
        said = {"tokenizer_class": name, "added_tokens_decoder": described, "eos_token": "</s>", "unk_token": "</s>"}
        said |= {"bos_token": None, "pad_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | config))
        (tmp_path / "config.json").write_text("{}")
        save_file({}, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.supports("Files", "vocab.json and merges.txt of GPT-2's and Qwen2's tokenizers")
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_known_classes(write: Callable[..., Path], name: str) -> None:
    folder = write(name)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(SafetensorsCheckpoint.open(folder).tokenizer)
    assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    for text in TEXTS:
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("CTRLTokenizer", {}, "GPT2Tokenizer or Qwen2Tokenizer, not 'CTRLTokenizer'"),
        (None, {}, "not None"),
        ("GPT2Tokenizer", {"add_prefix_space": True}, "not read with add_prefix_space"),
        ("GPT2Tokenizer", {"add_bos_token": True}, "not read with add_bos_token"),
    ],
)
def test_doubtful_vocabularies_are_refused(
    write: Callable[..., Path], name: str | None, config: dict[str, Any], message: str
) -> None:
    files = SafetensorsCheckpoint.open(write(name, **config)).tokenizer
    with pytest.raises(CheckpointError, match=rf"{message}; write one with transformers: .*save_pretrained"):
        load_tokenizer(files)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"no tokenizer\.json and no tokenizer of another form: put tokenizer\.json"),
        (["tokenizer.model"], r"only tokenizer\.model; write one with transformers: AutoTokenizer\.from_pretrained"),
        (["vocab.json"], r"only vocab\.json; write one"),
        (["tekken.json", "tokenizer.model.v3"], r"only tekken\.json; write one"),
    ],
)
def test_other_files_are_named_with_what_to_do(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(b"?")
    with pytest.raises(CheckpointError, match=f"{message}.*token ids"):
        load_tokenizer(SafetensorsCheckpoint.open(tmp_path).tokenizer)


def test_damaged_vocabularies(write: Callable[..., Path]) -> None:
    folder = write("GPT2Tokenizer")
    for change, message in (
        ({"added_tokens_decoder": {"7": {"content": "</s>"}}}, "gives '</s>' the id 7"),
        ({"added_tokens_decoder": {"x": {"content": "</s>"}}}, "added_tokens_decoder .* is damaged"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder .* is damaged"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(SafetensorsCheckpoint.open(write("GPT2Tokenizer", **change)).tokenizer)
    write("GPT2Tokenizer")
    (folder / "merges.txt").write_text("#version: 0.2\nq zz\n")
    with pytest.raises(CheckpointError, match="not a vocabulary that can be read"):
        load_tokenizer(SafetensorsCheckpoint.open(folder).tokenizer)
    (folder / "vocab.json").write_text("[")
    with pytest.raises(CheckpointError, match="not a vocabulary that can be read"):
        load_tokenizer(SafetensorsCheckpoint.open(folder).tokenizer)
