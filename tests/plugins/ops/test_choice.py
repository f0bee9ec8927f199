"""What `auto` chooses for a CUDA device: the Triton parts where they can serve, the torch parts elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec

import pegboard.builtin
import pegboard_attention.manifest
import pegboard_ops.manifest
from pegboard.config import PartChoice
from pegboard.contracts.attention import AttentionLayer, AttentionNeed
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.ops import OpsNeed
from pegboard.registry.registry import Registry
from pegboard.registry.resolution import Decision, resolve

MANIFESTS = (pegboard.builtin, pegboard_attention.manifest, pegboard_ops.manifest)
H200 = DeviceFacts(type="cuda", capability=(9, 0))
OPS = OpsNeed(device=H200, dtype="bfloat16", hidden_size=4096, head_sizes=(128,), activations=("silu",))
DECODE = AttentionNeed(
    device=H200,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=16,
    layers=(AttentionLayer(query_heads=32, kv_heads=8, head_size=128, scale=0.1),),
    phase="decode",
    max_query=1,
    max_rows=64,
    max_length=8192,
)


def decide(role: str, need: Any, **changes: Any) -> Decision:
    need = msgspec.structs.replace(need, **changes)
    registry = Registry.discover(MANIFESTS, entry_points=False)
    device = need.device.type
    return resolve(registry, role, PartChoice(), need, device_type=device, objective="throughput", allow=())


def test_ops() -> None:
    assert decide("ops", OPS).winner == "triton"
    assert decide("ops", OPS, dtype="float64").winner == "torch"
    assert decide("ops", OPS, device=DeviceFacts(type="cuda", capability=(7, 5))).winner == "torch"
    assert decide("ops", OPS, device=DeviceFacts(type="cpu")).winner == "torch"


def test_decode_attention() -> None:
    assert decide("attention", DECODE).winner == "flash_decoding"
    assert decide("attention", DECODE, kv_dtype="int8").winner == "flash_decoding"
    assert decide("attention", DECODE, batch_invariant=True).winner == "flash_decoding"
    assert decide("attention", DECODE, dtype="float64", kv_dtype="float64").winner == "torch"
    assert decide("attention", DECODE, device=DeviceFacts(type="cpu")).winner == "torch"
    refused = decide("attention", DECODE, score_mass=True)
    assert refused.winner is None
    assert "score mass" in refused.reasons_text()
