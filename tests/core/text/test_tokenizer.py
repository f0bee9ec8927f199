from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pegboard.checkpoints.gguf import GGUFCheckpoint
from pegboard.contracts.checkpoint import TokenizerFiles
from pegboard.errors import CheckpointError
from pegboard.hub import resolve_model
from pegboard.text import Tokenizer, load_tokenizer
from pegboard.text.gguf_pre_tokenizers import PRE_TOKENIZERS

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  leading and trailing  ",
    "line\n\n\ttabs\r\n",
    "It's 12345 o'clock, isn't it? I'LL",
    "한국어 日本語 текст été e\u0301",
    "👩‍👩‍👧‍👦😀",
    "a<tool call>b été",
    "<|im_start|>user\nhi<|im_end|>",
    "\x00\x7f\u200b\ufeff\ufffd",
    "camelCase HTMLParser/path//x ÀB",
]
KINDS = ["byte_level", "byte_fallback", "metaspace"]
Make = Callable[..., Tokenizer]


def reference(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    twin = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=twin, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_agrees_with_transformers(make_tokenizer: Make, kind: str, text: str) -> None:
    ours = make_tokenizer(kind, bos_token="<s>", eos_token="</s>")
    theirs = reference(ours)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    for add in (True, False):
        wanted = theirs.encode(text, add_special_tokens=add)
        assert ours.encode(text, add_special=add, allow_special=True) == wanted
        twice = [*wanted, theirs.eos_token_id, *wanted]
        for skip in (True, False):
            assert ours.decode(twice, skip_special=skip) == theirs.decode(twice, skip_special_tokens=skip)


def test_names_of_special_tokens_are_plain_text_unless_allowed(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("byte_level")
    text = "hi<|im_end|></s> <tool call>"
    plain = tokenizer.encode(text, add_special=False)
    assert not set(plain) & tokenizer.special_ids
    assert tokenizer.decode(plain) == text
    assert tokenizer.backend.token_to_id("<tool call>") in plain
    allowed = tokenizer.encode(text, add_special=False, allow_special=True)
    assert [i for i in allowed if i in tokenizer.special_ids] == [3, 1]
    assert tokenizer.decode(allowed) == "hi <tool call>"
    assert tokenizer.encode("hi")[0] == 0


def test_special_ids_and_tokens_named_by_the_config_only(make_tokenizer: Make) -> None:
    assert make_tokenizer("byte_level").special_ids == {0, 1, 2, 3}
    tokenizer = make_tokenizer("byte_level", eos_token={"content": "f"}, pad_token="not there")
    letter = tokenizer.backend.token_to_id("f")
    assert tokenizer.eos_id == letter
    assert letter in tokenizer.special_ids
    assert tokenizer.bos_id is None


def test_token_text_keeps_the_space(make_tokenizer: Make) -> None:
    for kind in KINDS:
        tokenizer = make_tokenizer(kind)
        ids = tokenizer.encode("the quick brown fox jumps", add_special=False)
        assert "".join(tokenizer.token_text(i) for i in ids).removeprefix(" ") == "the quick brown fox jumps"
        assert tokenizer.token_text(tokenizer.backend.token_to_id("</s>")) == "</s>"
        assert tokenizer.token_text(100_000) == ""


def test_chat_templates(make_tokenizer: Make) -> None:
    assert make_tokenizer("byte_level").chat_template is None
    assert make_tokenizer("byte_level", chat_template="one").chat_template == "one"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    tokenizer = make_tokenizer("byte_level", chat_template=named)
    assert tokenizer.chat_template == "one"
    assert tokenizer.chat_templates == {"default": "one", "tool_use": "two"}
    with pytest.raises(CheckpointError, match="chat_template"):
        make_tokenizer("byte_level", chat_template=[{"name": "default"}])


def test_padding_and_truncation_in_the_file_do_not_cut_prompts(tmp_path: Path, make_tokenizer: Make) -> None:
    backend = make_tokenizer("byte_level").backend
    twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.enable_truncation(4)
    twin.enable_padding(length=50)
    twin.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(TokenizerFiles(tokenizer_json=tmp_path / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog."
    assert loaded.encode(text) == make_tokenizer("byte_level").encode(text)


def test_tokenizers_that_are_refused(tmp_path: Path, make_tokenizer: Make) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(TokenizerFiles())
    path = tmp_path / "tokenizer.json"
    for content in (None, "", "{}", '{"model": 1}'):
        if content is not None:
            path.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load_tokenizer(TokenizerFiles(tokenizer_json=path))
    with pytest.raises(CheckpointError, match="eos token 'nowhere' is not in its vocabulary"):
        make_tokenizer("byte_level", eos_token="nowhere")
    with pytest.raises(CheckpointError, match="expected a string"):
        make_tokenizer("byte_level", eos_token=3)


def gguf_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of single bytes and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "1 2", "12 3", "123 4", "Ġ Ġ", "' L", "'L L", "x y"]
    tokens = ["<bos>", "<eos>", "<user>", *alphabet, *(merge.replace(" ", "") for merge in merges), "whole", "Ġwhole"]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


#: Names of the same pre-tokenizer.
ALIASES = {"starcoder": "smollm", "refact": "smollm", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
ALIASES |= {"deepseek-r1-qwen": "qwen2"}


def published(pre: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The pre-tokenizer of the model's published tokenizer.json."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    words += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    whole_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tekken = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    tekken += r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    tekken += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    coder = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
    split = {
        "tekken": [pre_tokenizers.Split(Regex(tekken), "isolated"), whole_words],
        "deepseek-coder": [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in coder),
            pre_tokenizers.Digits(individual_digits=True),
            whole_words,
        ],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": [pre_tokenizers.Split(Regex(words % "{1,3}"), "isolated"), whole_words],
        "qwen2": [pre_tokenizers.Split(Regex(words % ""), "isolated"), whole_words],
    }[ALIASES.get(pre, pre)]
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=ALIASES.get(pre, pre) in ("llama-bpe", "tekken"))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens(["<user>"])
    return tokenizer


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
@pytest.mark.parametrize("text", [*TEXTS, "the 12345 the1234the  whole wholexy I'LL<user><eos>", "e\u0301"])
def test_gguf_vocabulary(pre: str, text: str) -> None:
    metadata = gguf_metadata(pre)
    ours = load_tokenizer(TokenizerFiles(gguf=metadata))
    theirs = published(pre, metadata)
    ids = ours.encode(text, add_special=False, allow_special=True)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
    assert (ours.bos_id, ours.eos_id, ours.special_ids) == (0, 1, {0, 1})


@pytest.mark.parametrize(
    ("pre", "changes", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"add_bos_token": True}, ([0], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
    ],
)
def test_gguf_says_what_goes_around_a_text(
    pre: str, changes: dict[str, Any], around: tuple[list[int], list[int]]
) -> None:
    tokenizer = load_tokenizer(TokenizerFiles(gguf=gguf_metadata(pre, **changes)))
    bare = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("the") == [*around[0], *bare, *around[1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "scores must hold one number"),
        ({"model": "bert"}, "'bert'; supported: 'gpt2'"),
        ({"pre": "default"}, "'default'; supported: gpt-2, smollm, .*, llama-bpe, .*, qwen2, .*tekken"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": [1]}, "merges is missing or is no array of strings"),
        ({"merges": ["t zz"]}, "merges do not fit"),
        ({"merges": ["nospace"]}, "merges do not fit"),
        ({"token_type": [1]}, "one type for each"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"bos_token_id": None, "add_bos_token": True}, "names no bos_token_id"),
    ],
)
def test_gguf_vocabularies_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(TokenizerFiles(gguf=gguf_metadata(**{"pre": "gpt-2", **changes})))


def test_padding_of_a_gguf_vocabulary_is_no_part_of_the_tokenizer() -> None:
    """The converter fills the list up to the rows of the head; a hole between tokens stays one of them."""
    metadata = gguf_metadata("gpt-2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    count = len(tokens)
    hole = [f"[PAD{count}]", "<late>"]
    padding = [f"[PAD{i}]" for i in range(count + 2, count + 9)]
    metadata |= {"tokenizer.ggml.tokens": [*tokens, *hole, *padding]}
    metadata |= {"tokenizer.ggml.token_type": [*types, 5, 3, *[5] * len(padding)]}
    tokenizer = load_tokenizer(TokenizerFiles(gguf=metadata))
    assert tokenizer.vocab_size == count + 2
    assert tokenizer.encode("the<late>", allow_special=True)[-1] == count + 1
    assert tokenizer.decode([count + 5]) == ""


def test_gguf_chat_templates() -> None:
    metadata = gguf_metadata("gpt-2") | {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    assert load_tokenizer(TokenizerFiles(gguf=metadata)).chat_templates == {"default": "one", "tool_use": "two"}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        path = resolve_model("smollm2-135m-instruct")
    except CheckpointError as error:
        pytest.skip(str(error))
    return load_tokenizer(GGUFCheckpoint.open(path).tokenizer)


@pytest.mark.model
def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49152, 1, 2)
    assert smollm2.bos_token == "<|im_start|>"
    assert smollm2.eos_token == "<|im_end|>"
    assert smollm2.special_ids == set(range(17))
    assert smollm2.decode([33, 30, 216, 33, 198]) == "1. 1\n"
    digits = smollm2.encode("1234567890")
    assert [smollm2.token_text(i) for i in digits] == list("1234567890")


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trips(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text
