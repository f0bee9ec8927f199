"""A decision says what the winner costs elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.assembly import explain
from pegboard.config import load_config
from pegboard.contracts.device import DeviceFacts
from pegboard.registry.registry import Registry
from pegboard.registry.report import decisions_text

H200 = DeviceFacts(
    type="cuda", index=0, name="NVIDIA H200", capability=(9, 0), total_bytes=141 << 30, free_bytes=140 << 30
)


@pytest.mark.parametrize(
    ("recorded", "noted"), [(True, {"attention", "decode_attention", "ops", "sampler"}), (False, set())]
)
def test_parts_that_can_not_be_recorded_are_named(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool, noted: set[str]
) -> None:
    monkeypatch.setattr("pegboard.survey.device_facts", lambda _: H200)
    parts = {where: {"use": "torch"} for where in ("attention", "ops", "sampler")}
    config = load_config({"model": str(tiny_path), "cuda_graphs": recorded, **parts}, {})
    decisions = explain(config, Registry.discover())
    assert {decision.where for decision in decisions if decision.notes} == noted
    assert ("can't be recorded in a CUDA graph" in decisions_text(decisions)) == recorded


def test_first_party_parts_of_a_gpu_can_be_recorded(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.survey.device_facts", lambda _: H200)
    config = load_config({"model": str(tiny_path), "dtype": "bfloat16"}, {})
    decisions = {decision.where: decision for decision in explain(config, Registry.discover())}
    chosen = {where: decisions[where].winner for where in ("attention", "decode_attention", "ops", "sampler")}
    assert chosen == {
        "attention": "flash_attention_2",
        "decode_attention": "flash_decoding",
        "ops": "triton",
        "sampler": "fused",
    }
    assert not any(decision.notes for decision in decisions.values())
