"""`best_of`: the most probable of several samples, each as it would be among `n`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pegboard import InvalidRequest, SamplingParams
from pegboard.testing.tiny import tiny_model

PROMPT = [5, 9, 13, 40, 77]
EACH = SamplingParams(n=6, seed=3, max_tokens=9, logprobs=1, stop_token_ids=tuple(range(100, 130)))


def total(completion: Any) -> float:
    return sum(record.logprob for record in completion.logprobs)


@pytest.mark.supports("Sampling", "the best of several samples by their log-probabilities (best_of)")
def test_the_most_probable_come_back_best_first(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=4)
    ranked = sorted(engine.generate([PROMPT], EACH)[0].completions, key=total, reverse=True)
    output = engine.generate([PROMPT], replace(EACH, n=3, best_of=6, prompt_logprobs=0))[0]
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in ranked[:3]]
    assert [c.logprobs for c in output.completions] == [c.logprobs for c in ranked[:3]]
    assert [c.score for c in output.completions] == pytest.approx([total(c) for c in ranked[:3]])
    assert [c.finish_reason for c in output.completions] == [c.finish_reason for c in ranked[:3]]
    assert [c.index for c in output.completions] == [0, 1, 2]
    assert len(output.prompt_logprobs) == len(PROMPT) - 1
    quiet = engine.generate([PROMPT], replace(EACH, n=1, best_of=6, logprobs=None))[0]
    assert (quiet.token_ids, quiet.completions[0].logprobs) == (ranked[0].token_ids, None)


def test_a_stream_has_the_best_only(tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    """With stop strings, behind which nothing counts."""
    path = tiny_model(tmp_path / "m")
    engine = make_engine(path, device="cpu", max_rows=8, stream_buffer=1)
    params = SamplingParams(best_of=5, n=2, seed=1, max_tokens=12, stop=("e", "t", "a", "o"))
    whole = engine.generate("hello", params)
    texts: dict[int, str] = {}
    for delta in engine.stream("hello", params):
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    assert texts == {c.index: c.text for c in whole.completions}
    assert all(c.finish_reason in ("stop", "length") for c in whole.completions)


def test_abort_ends_all(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=2)
    handle = engine.submit(PROMPT, SamplingParams(best_of=6, n=2, max_tokens=400, ignore_eos=True))
    handle.abort()
    assert [c.finish_reason for c in handle.result(timeout=60).completions] == ["abort", "abort"]
    scheduler = engine._phases.scheduler
    assert not scheduler.has_work()
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"best_of": 2, "n": 3}, "best_of is 2, must be at least n, 3"),
        ({"best_of": 0}, "best_of is 0"),
        ({"best_of": 9}, "best_of is 9, the queue holds 8 sequences"),
    ],
)
def test_what_can_not_be_is_refused(tiny_path: Path, make_engine: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        make_engine(tiny_path, device="cpu", max_queue=8).submit(PROMPT, SamplingParams(**fields))
