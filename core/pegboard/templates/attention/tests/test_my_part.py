from __future__ import annotations

from pegboard import SamplingParams
from pegboard.testing import AttentionSuite, isolated_engine

import my_part

PART = my_part.pegboard_parts()[0]


class TestMyPart(AttentionSuite):
    """The contract: against float64 over dense rows, whatever the page table."""

    part = PART
    dtypes = ("float32", "bfloat16")
    claims = ("window", "softcap", "sinks", "verify", "batch_invariant")


class TestSmallBlocks(AttentionSuite):
    """Most rows have many blocks, some of which a query does not see at all."""

    part = PART
    options = {"block": 3}
    claims = ("window", "softcap", "sinks")


def test_an_engine_uses_it(model: str) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [list(range(3, 40)), [5, 6]]
    with isolated_engine(model, plugins=[my_part], attention="my-part") as engine:
        assert engine.plan.parts["attention"].name == "my-part"
        found = engine.generate(prompts, greedy)
    with isolated_engine(model) as engine:
        expected = engine.generate(prompts, greedy)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
