"""`pegboard tune` on the device at hand, and engines that take its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.tuning import tune

pytestmark = pytest.mark.gpu


@pytest.mark.supports("On a GPU", "tables of kernels measured on the device at hand (pegboard tune)")
def test_a_table_is_measured_and_taken(make_engine: Callable[..., Any], tiny_path: Path, tmp_path: Path) -> None:
    """Two engines with it give the same tokens and the same log-probabilities, bit for bit."""
    options = {"group": 32, "skip": []}
    config = {"model": str(tiny_path), "device": "cuda", "dtype": "bfloat16"}
    path = tmp_path / "table.json"
    report = tune({**config, "quantizer": {"use": "int4", "options": options}}, path, rows=(1, 4))
    assert report.device == torch.cuda.get_device_name()
    assert len(report.found) >= 4
    for one in report.found:
        assert 0 < one.microseconds < 1000
        assert one.ways >= 3
    outputs = []
    for _ in range(2):
        engine = make_engine(**config, quantizer={"use": "int4", "options": {**options, "table": str(path)}})
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8, logprobs=2))
        completion = output.raise_for_error()
        outputs.append((completion.token_ids, repr(completion.completions[0].logprobs)))
    assert outputs[0] == outputs[1]
