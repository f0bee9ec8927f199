from __future__ import annotations

from pathlib import Path

import msgspec
import no_repeat_ngram
import pytest
from no_repeat_ngram.processor import NoRepeatNgram

from pegboard import InvalidRequest, SamplingParams
from pegboard.testing import ProcessorSuite, isolated_engine, tiny_model

PROMPT = [5, 9, 13, 5, 9]
#: 60 tokens among these three can't but repeat runs of three.
FEW = {5: 40.0, 9: 40.0, 13: 40.0}


class TestConformance(ProcessorSuite):
    part = NoRepeatNgram
    dtypes = ("float32", "float16", "bfloat16")
    examples = ({}, {"size": 2}, {"size": 1, "prompt": False})
    wrong = ({"size": 0}, {"sizes": 3})
    text = (9, 2, 9, 2, 9, 2)  # drafts whose runs come again among themselves


def runs(tokens: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=1, tokenizer=False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_run_comes_twice(path: Path, size: int) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias=FEW)
    asked = msgspec.structs.replace(greedy, processors={"no-repeat-ngram": {"size": size}})
    with isolated_engine(path, plugins=[no_repeat_ngram], logits_processors=["no-repeat-ngram"]) as engine:
        plain, output = engine.generate([PROMPT], greedy)[0], engine.generate([PROMPT], asked)[0]
    before = runs(PROMPT, size)
    found = runs([*PROMPT, *output.token_ids], size)
    assert len(set(found[len(before) :]) - set(before)) == len(found) - len(before)
    again = runs(list(plain.token_ids), size)
    assert len(set(again)) < len(again)


def test_the_prompt_may_be_left_out(path: Path) -> None:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, processors={"no-repeat-ngram": {"size": 1, "prompt": False}}
    )
    with isolated_engine(path, plugins=[no_repeat_ngram], logits_processors=["no-repeat-ngram"]) as engine:
        best = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))[0].token_ids
        assert engine.generate([[*PROMPT, *best]], sampling)[0].error is None
        assert engine.generate([PROMPT], sampling)[0].token_ids == best
        with pytest.raises(InvalidRequest, match="size"):
            engine.submit(PROMPT, SamplingParams(processors={"no-repeat-ngram": {"size": 0}}))
