"""NumbaAttention: what its bits depend on, and what it refuses. Its results: test_numba_conformance.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("numba")

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard.errors import PegboardError
from pegboard.testing.conformance import normal, same_bits
from pegboard_cpu.attention import NumbaAttention, NumbaPlan

LAYER = AttentionLayer(query_heads=6, kv_heads=2, head_size=64, scale=0.125)
NEED = AttentionNeed(
    device=DeviceFacts(type="cpu"),
    dtype="float32",
    kv_dtype="float32",
    page_size=16,
    layers=(LAYER,),
    phase="decode",
    max_query=1,
    max_rows=8,
    max_length=512,
)
LENGTHS = (5, 129, 1, 400)


def step(lengths: tuple[int, ...]) -> Rows:
    pages = -(-max(LENGTHS) // 16)
    table = torch.arange(len(lengths) * pages, dtype=torch.int32).view(len(lengths), pages)
    return Rows(
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        row_slot=torch.arange(len(lengths)),
        ancestors=None,
        bounds=Bounds(rows=len(lengths), tokens=len(lengths), max_query=1, min_query=1, max_kv=max(lengths)),
    )


def cache_of() -> LayerCache:
    layout = NumbaAttention.layouts(NEED, LAYER, None)[0]
    k, v = normal(200, 16, 2, 64).float(), normal(200, 16, 2, 64, seed=1).float()
    return LayerCache(layout=layout, group=0, page_size=16, tensors={"k": k, "v": v})


def mix(threads: int, rows: Rows, q: torch.Tensor) -> torch.Tensor:
    backend = NumbaAttention.create(NEED, None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return backend.forward(q, None, None, cache_of(), backend.plan(rows, LAYER, {}))
    finally:
        torch.set_num_threads(before)


def test_threads_and_neighbours_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_cpu.attention._ENOUGH", 1)
    q, rows = normal(4, 6, 64, seed=2).float(), step(LENGTHS)
    alone = mix(1, rows, q)
    assert alone.isfinite().all()
    for threads in (2, 3, 11):
        assert same_bits(mix(threads, rows, q), alone)
    assert same_bits(mix(2, step(LENGTHS[:2]), q[:2]), alone[:2])


def test_threads_are_worth_their_while() -> None:
    backend, before = NumbaAttention.create(NEED, None), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        plans: list[NumbaPlan] = [backend.plan(step(lengths), LAYER, {}) for lengths in ((5,), (400,) * 4)]
    finally:
        torch.set_num_threads(before)
    assert [plan.threads for plan in plans] == [1, 4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"phase": "prefill"}, "serves decode rows only"),
        ({"dtype": "float64"}, "computes in float32, not in float64"),
        ({"kv_dtype": "int8"}, "reads K/V of float32 only, not int8"),
        ({"ancestors": True}, "does not verify trees"),
        ({"score_mass": True}, "does not report score mass"),
        ({"device": DeviceFacts(type="cuda")}, "runs on the CPU, not on cuda"),
        ({"layers": (replace(LAYER, head_size=40),)}, "not 40"),
        ({"layers": (replace(LAYER, query_heads=5),)}, "5 query heads are no multiple of 2 KV heads"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str) -> None:
    assert not NumbaAttention.refusals(NEED, None)
    [found] = NumbaAttention.refusals(replace(NEED, **change), None)
    assert reason in found


def test_wrong_calls_are_named() -> None:
    backend = NumbaAttention.create(NEED, None)
    plan = backend.plan(step((5,)), LAYER, {})
    with pytest.raises(PegboardError, match="the plan is for"):
        backend.forward(torch.zeros(2, 6, 64), None, None, cache_of(), plan)
    with pytest.raises(PegboardError, match="sinks without need"):
        backend.forward(torch.zeros(1, 6, 64), None, None, cache_of(), plan, torch.zeros(6))
