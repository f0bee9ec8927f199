"""Structured output: whatever the model would like to say, the text is of the shape that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import tokenizers
import torch
from pydantic import BaseModel, ConfigDict, Field

pytest.importorskip("llguidance", reason='pip install "pegboard[structured]"')

from llguidance import LLTokenizer

from pegboard import ConfigError, Engine, InvalidRequest, PegboardError, SamplingParams
from pegboard.testing import ProcessorSuite, tiny_model, write_tokenizer
from pegboard.text.sentencepiece_bpe import sentencepiece_bpe
from pegboard_sampling.structured.arguments import Arguments
from pegboard_sampling.structured.bitmask import Bitmask
from pegboard_sampling.structured.matching import Text, compile_grammar
from pegboard_sampling.structured.processor import StructuredOutput

VOCABULARY = 300
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "age", "name"],
    "additionalProperties": False,
}
LARK = 'start: sum\nsum: number ("+" number)~1..3\nnumber: /[1-9][0-9]?/\n'
GBNF = 'root ::= "<" [a-z]+ ">"\n'


def structured(**arguments: Any) -> dict[str, dict[str, Any]]:
    return {"structured": arguments}


def matches(text: str, asked: dict[str, Any]) -> bool:
    """By the definition, without the library."""
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    if asked.get("grammar") == LARK:
        return re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}", text) is not None
    if "grammar" in asked:
        return re.fullmatch(r"<[a-z]+>", text) is not None
    found = json.loads(text)
    return (
        set(found) == {"kind", "age", "name"}
        and found["kind"] in ("cat", "dog")
        and type(found["age"]) is int
        and 0 <= found["age"] <= 30
        and len(found["name"]) <= 6
        and (asked.get("whitespace", False) or text == json.dumps(found, ensure_ascii=False) or "\\" in text)
    )


ASKED: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": "[0-9]{3}-[a-f]{2}"},
    {"grammar": LARK},
    {"regex": "yes|no"},
    {"grammar": GBNF},
    {"json_schema": json.dumps(SCHEMA), "whitespace": True},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, byte-level BPE in which every text can be written."""
    return tiny_model(tmp_path_factory.mktemp("structured") / "m", vocab_size=VOCABULARY, std=0.1)


@pytest.fixture(scope="module", params=[0, 2], ids="depth {}".format)
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    with Engine(path, device="cpu", max_rows=16, run_ahead=request.param, logits_processors=["structured"]) as engine:
        yield engine


@pytest.mark.supports(
    "Sampling", "structured output: JSON schema, regex, Lark and GBNF grammars (processor structured)"
)
def test_different_shapes_beside_free_text(engine: Engine) -> None:
    """EOS comes when the text is complete and not before; nobody's tokens change for a neighbour."""
    free = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)
    alone = engine.generate("free", free).token_ids
    handles = []
    for seed in range(4):
        for asked in ASKED:
            params = SamplingParams(seed=seed, max_tokens=300, processors=structured(**asked))
            handles.append((asked, engine.submit("hello", params)))
        handles.append(({}, engine.submit("free", free)))
    for asked, handle in handles:
        output = handle.result(timeout=120).raise_for_error()
        if not asked:
            assert output.token_ids == alone
            continue
        if output.finish_reason == "stop":
            assert matches(output.text, asked), output.text
            assert output.token_ids[-1] == 2
            assert 2 not in output.token_ids[:-1]
        else:  # cut off in a pattern without an end
            assert len(output.token_ids) == 300
            assert asked["grammar"] == GBNF or asked.get("whitespace")


def test_greedy_texts_are_deterministic_and_logprobs_are_the_models(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, processors=structured(regex="[0-9]{4}"))
    first, second = engine.generate("x", params), engine.generate("x", params)
    assert first.token_ids == second.token_ids
    assert re.fullmatch("[0-9]{4}", first.text)
    assert all(record.logprob < -1.0 for record in first.completions[0].logprobs)  # none is certain of itself


@pytest.mark.supports("Sampling", "structured output of requests that speculate")
@pytest.mark.parametrize("ahead", [0, 2])
def test_beside_drafts(path: Path, make_engine: Callable[..., Any], ahead: int) -> None:
    """It has some itself, and is what it would be without a speculator, as its neighbours are."""
    copied = "one two three four five six, " * 4
    # Biased to few tokens, so that there is something to copy
    free = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={40: 60.0, 41: 60.0})
    asked = [(copied, free)]
    asked += [("hello", SamplingParams(seed=3, max_tokens=200, processors=structured(**one))) for one in ASKED[:4]]
    found = []
    for settings in ({}, {"speculator": "ngram", "adapt_drafts": False}):
        engine = make_engine(
            path, device="cpu", max_rows=8, run_ahead=ahead, logits_processors=["structured"], **settings
        )
        handles = [engine.submit(*one) for one in asked]
        outputs = [handle.result(timeout=120).raise_for_error() for handle in handles]
        for output, one in zip(outputs[1:], ASKED, strict=False):
            assert matches(output.text, one), output.text
        found.append([output.token_ids for output in outputs])
        stats = engine.stats().speculation
    assert found[0] == found[1]
    assert stats.accepted[0] > 5


def test_preempted_texts_go_on(path: Path, make_engine: Callable[..., Any]) -> None:
    page = 16 * 2 * 2 * 16 * 4 * 3
    settings = {"max_length": 48, "kv_memory": 5 * page, "max_rows": 8, "logits_processors": ["structured"]}
    engine = make_engine(path, device="cpu", **settings)
    params = [SamplingParams(seed=i, max_tokens=40, processors=structured(regex="[a-z]{36}")) for i in range(4)]
    texts = [handle.result(timeout=120).text for handle in [engine.submit([5], asked) for asked in params]]
    assert all(re.fullmatch("[a-z]{36}", text) for text in texts)
    assert engine.stats().preemptions_total > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "give one of json_schema, regex and grammar, not none of them"),
        ({"regex": "a", "grammar": "start: /a/"}, "not regex and grammar"),
        ({"regex": "a("}, "regex: .*unclosed group"),
        ({"json_schema": {"type": "nope"}}, "json_schema: .*nope"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"grammar": "start: nothing"}, 'grammar: .*unknown name: "nothing"'),
        ({"regexp": "a"}, "unknown key; did you mean 'regex'"),
        ({"regex": "a", "whitespace": True}, "whitespace goes with json_schema"),
    ],
)
def test_what_can_not_be_is_refused_at_submission(engine: Engine, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)processors.structured.*{reason}"):
        engine.submit("x", SamplingParams(processors=structured(**arguments)))
    with pytest.raises(InvalidRequest, match="ignore_eos is True"):
        engine.submit("x", SamplingParams(ignore_eos=True, processors=structured(regex="a")))
    with pytest.raises(InvalidRequest, match="min_tokens is 3: a text that is complete before"):
        engine.submit("x", SamplingParams(min_tokens=3, processors=structured(regex="a")))


def test_models_that_it_can_not_serve(tiny_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pegboard.registry.judging
    from pegboard_sampling.structured import processor

    with pytest.raises(ConfigError, match="the model has no tokenizer"):
        Engine(tiny_path, device="cpu", logits_processors=["structured"])
    with monkeypatch.context() as patch:
        patch.setattr(processor, "version", lambda name: "1.8.2")
        with pytest.raises(ConfigError, match=r'needs llguidance 1.9 or later, not 1.8.2: pip install "pegboard'):
            Engine(path, device="cpu", logits_processors=["structured"])
    known = pegboard.registry.judging._importable
    monkeypatch.setattr(pegboard.registry.judging, "_importable", lambda name: name != "llguidance" and known(name))
    with pytest.raises(ConfigError, match=r'needs llguidance.*pip install "pegboard\[structured\]"'):
        Engine(path, device="cpu", logits_processors=["structured"])


@pytest.mark.supports("Sampling", "structured output with SentencePiece's BPE")
def test_sentencepiece(tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    """With a space before words, and bytes for characters without a piece."""
    from tokenizers import AddedToken

    path = tiny_model(tmp_path / "m", vocab_size=400, std=0.1, tokenizer=False)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["\u2581", *map(chr, range(33, 127)), "\u2581c", "at", "dog", '"k', "ind", '":', "\u2581d", "ca"]
    tokenizer = sentencepiece_bpe(
        [*pieces, *words], [0.0] * len(pieces) + [-float(i) for i in range(len(words))], [*types, *[1] * len(words)],
        unknown="<unk>", space_prefix=True,
    )  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    engine = make_engine(path, device="cpu", logits_processors=["structured"], max_rows=8)
    asked = [*ASKED[:4], {"regex": "[äöü]{2} [€]"}]
    for seed in range(3):
        for arguments in asked:
            params = SamplingParams(seed=seed, max_tokens=200, processors=structured(**arguments))
            output = engine.generate("hello", params).raise_for_error()
            assert output.finish_reason == "stop"
            assert matches(output.text, arguments), output.text


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=30)
    legs: int = Field(ge=0, le=8)
    sound: Literal["meow", "woof", "moo"]
    colours: list[str] = Field(min_length=1, max_length=3)


@pytest.mark.model
@pytest.mark.supports("Sampling", "structured output of SmolLM2, several grammars in a step")
def test_smollm2(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(
        "smollm2-135m-instruct", device="cpu", max_rows=8, max_length=1024, logits_processors=["structured"]
    )
    ask = engine.chat_request([{"role": "user", "content": "Describe a cat as JSON with name, legs, sound, colours."}])
    schema = structured(json_schema=Animal.model_json_schema())
    handles = [
        engine.submit(ask, SamplingParams(temperature=temperature, seed=3, max_tokens=160, processors=schema))
        for temperature in (0.0, 1.0)
    ]
    capital = engine.chat_request([{"role": "user", "content": "What is the capital of France?"}])
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    plain = engine.submit(capital, greedy)
    shape = structured(regex="[A-Z][a-z]{1,12}")
    word = engine.submit(capital, SamplingParams(temperature=0.0, max_tokens=12, processors=shape))
    for handle in handles:
        output = handle.result(timeout=120).raise_for_error()
        assert output.finish_reason == "stop", output.text
        Animal.model_validate_json(output.text, strict=True)
    assert plain.result(timeout=60).text == "The capital of France is Paris."
    assert re.fullmatch("[A-Z][a-z]{1,12}", word.result(timeout=60).text)


def tiny_tokenizer() -> tuple[str, tuple[int, ...]]:
    """Its file's text, and ids of six digits."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCABULARY)
        made = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    return made, tuple(tokenizers.Tokenizer.from_str(made).encode("926535").ids)


TOKENIZER, DIGITS = tiny_tokenizer()


class TestConformance(ProcessorSuite):
    """Texts of digits fit all of the examples."""

    part = StructuredOutput
    dtypes = ("float32", "float16", "bfloat16")
    examples = (
        {"regex": "[0-9]+"},
        {"json_schema": {"type": "integer"}},
        {"grammar": "start: /[1-9]/ /[0-9]/*"},
    )
    wrong = ({"regex": "["}, {"json_schema": {"type": 3}}, {}, {"regex": "a", "no_such_argument": 1})
    vocab_size = VOCABULARY
    prompt = (5, 6, 7)
    text = DIGITS

    @classmethod
    def tokenizer_json(cls) -> str:
        return TOKENIZER


def allowed(masks: torch.Tensor) -> list[set[int]]:
    return [{id for id in range(VOCABULARY) if int(row[id // 32]) >> (id % 32) & 1} for row in masks]


def test_masks_behind_drafts() -> None:
    """A draft that is not allowed is never chosen, so nothing behind it matters; an EOS ends the text."""
    tokenizer = LLTokenizer(TOKENIZER, n_vocab=VOCABULARY, eos_token=[2])
    text = Text(compile_grammar(Arguments(regex="[0-9]{2,3}"), tokenizer), {2})
    everything = set(range(VOCABULARY))
    bitmask = Bitmask(VOCABULARY)
    nine, two, six, five = DIGITS[:4]

    def masks(*drafts: int) -> list[set[int]]:
        made = bitmask.host(1 + len(drafts), pinned=False)
        text.fill(made, drafts)
        return allowed(made)

    digits = masks()[0]
    assert digits >= set(DIGITS)
    assert 2 not in digits
    assert masks(nine, two, six) == [digits, digits, digits | {2}, {2}]
    assert masks(nine, 2, six) == [digits, digits, everything, everything]
    assert masks(nine, two, 2, six) == [digits, digits, digits | {2}, everything, everything]
    assert masks(nine, two, six, five) == [digits, digits, digits | {2}, {2}, everything]
    assert masks(5) == [digits, everything]
    text.accept((nine, two))
    assert masks() == [digits | {2}]
    with pytest.raises(PegboardError, match="does not follow the grammar"):
        text.accept((5,))
    text.accept((2,))
    assert masks() == [everything]
