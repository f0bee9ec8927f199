"""The real model on a GPU: greedy ids that an independent implementation gives, in every float type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pegboard import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.model]

#: For the chat message "Count from 1 to 20."; no choice in it is close.
COUNTING = "33 30 216 33 198 34 30 216 34 198 35 30 216 35 198 36 30 216 36 198 37 30 216 37 198 38 30 216 38 198 39 30"


@pytest.mark.supports("On a GPU", "SmolLM2-135M-Instruct from its GGUF file: ids of an independent implementation")
@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_counting_gives_the_reference_ids(make_engine: Callable[..., Any], dtype: str, graphs: bool) -> None:
    engine = make_engine(
        "smollm2-135m-instruct", device="cuda", dtype=dtype, cuda_graphs=graphs, kv_memory="1GiB", max_rows=16
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    expected = tuple(int(id) for id in COUNTING.split())
    alone = engine.chat([{"role": "user", "content": "Count from 1 to 20."}], sampling)
    assert alone.token_ids == expected
    for turn in range(3):  # new shapes run plainly first, then they are recorded
        asked = [
            engine.chat_request([{"role": "user", "content": "Count from 1 to 20."}], salt=f"{turn}.{row}")
            for row in range(12)
        ]
        assert [output.token_ids for output in engine.generate(asked, sampling)] == 12 * [expected]


def test_the_answer_in_float32(make_engine: Callable[..., Any]) -> None:
    """Its closest choice is by 0.08, too little for shorter types."""
    engine = make_engine("smollm2-135m-instruct", device="cuda", dtype="float32", kv_memory="1GiB", max_rows=4)
    asked = engine.chat_request([{"role": "user", "content": "What is the capital of France?"}])
    for _ in range(3):
        output = engine.generate([asked], SamplingParams(temperature=0.0, max_tokens=32))[0]
        assert output.token_ids == (504, 3575, 282, 4649, 314, 7042, 30, 2)
