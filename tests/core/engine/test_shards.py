"""An executor that splits each layer over ranks is asked for their number first: everything is planned for one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pegboard import EngineConfig, Part, hookimpl
from pegboard.assembly import assemble
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.executor import ExecutorNeed
from pegboard.runner import LocalExecutor
from pegboard.testing import isolated_registry, tiny_model


class TwoRanks(LocalExecutor):
    @classmethod
    def shards(cls, need: ExecutorNeed, options: Any) -> int:
        return 2


class Offers:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="executor", name="two-ranks", factory=TwoRanks, summary="Plans only")]


def test_a_rank_has_half_the_heads_and_half_of_each_page(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", tokenizer=False, vocab_size=212)
    assert TwoRanks.shards(ExecutorNeed(device=DeviceFacts(type="cpu")), None) == 2
    registry = isolated_registry([Offers()])
    whole, half = (
        assemble(EngineConfig.model_validate({"model": str(path), "device": "cpu", "executor": name}), registry)
        for name in ("local", "two-ranks")
    )
    [one], [other] = whole.plan.groups, half.plan.groups
    assert other.page_bytes * 2 == one.page_bytes
    assert half.plan.memory.weights < whole.plan.memory.weights
    assert [layer.kv_heads for layer in half.needs.prefill.layers] == [1]
    assert [layer.kv_heads for layer in whole.needs.prefill.layers] == [2]
