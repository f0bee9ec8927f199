from __future__ import annotations

import pytest
import torch
from pegboard import ConfigError, SamplingParams
from pegboard.linears import DenseParts
from pegboard.testing import QuantizerSuite, isolated_engine

import my_part
from my_part.quantizer import Int4Linear

PART = my_part.pegboard_parts()[0]


class TestMyPart(QuantizerSuite):
    """The contract: what is recognised, read, held and computed, whole and in shards."""

    part = PART
    dtypes = ("float32", "bfloat16")
    error = 0.15  # four bits, with a scale for 32 numbers


class TestLargeGroups(QuantizerSuite):
    part = PART
    options = {"group": 128}
    error = 0.2


def test_weights_on_the_grid_come_back_exactly() -> None:
    steps = torch.arange(-7.0, 8.0)
    row = torch.cat([steps, torch.zeros(1)])  # one group, whose largest weight is 7 steps of a quarter
    made = Int4Linear(DenseParts(weight=row[None] / 4, bias=None, all_reduce=None, partition=None), group=16)
    torch.testing.assert_close(made(torch.eye(16))[:, 0], row / 4, rtol=0, atol=0)


def test_an_engine_uses_it(model: str) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with isolated_engine(model, plugins=[my_part], quantizer="my-part") as engine:
        assert engine.plan.parts["quantizer"].name == "my-part"
        packed = engine.plan.memory.weights
        assert len(engine.generate([[5, 6, 7]], sampling)[0].token_ids) == 4
    with isolated_engine(model) as engine:
        assert packed < engine.plan.memory.weights


def test_a_group_that_does_not_divide_is_refused(model: str) -> None:
    quantizer = {"use": "my-part", "options": {"group": 128}}
    with pytest.raises(ConfigError, match=r"64 input features are no multiple of group = 128"):
        isolated_engine(model, plugins=[my_part], quantizer=quantizer).__enter__()
