"""NumbaAttention: what its bits depend on, and what it refuses. Its results: test_numba_conformance.py."""

from __future__ import annotations

from itertools import pairwise
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
PREFILL = replace(NEED, phase="prefill", max_query=512)
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


def fill(threads: int, q: torch.Tensor, first: int, page_size: int = 16, **facts: Any) -> torch.Tensor:
    """One row's queries `first` and on, which see entries up to their own."""
    layer = replace(LAYER, **facts)
    need = replace(PREFILL, page_size=page_size, layers=(layer,))
    backend, before = NumbaAttention.create(need, None), torch.get_num_threads()
    cache, tokens = cache_of(), q.shape[0]
    tensors = {name: tensor.view(-1, page_size, 2, 64) for name, tensor in cache.tensors.items()}
    rows = Rows(
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        kv_len=torch.tensor([first + tokens], dtype=torch.int32),
        page_table=torch.arange(len(tensors["k"]), dtype=torch.int32)[None],
        row_slot=torch.zeros(1, dtype=torch.int64),
        ancestors=None,
        bounds=Bounds(rows=1, tokens=tokens, max_query=tokens, min_query=tokens, max_kv=first + tokens),
    )
    torch.set_num_threads(threads)
    try:
        plan = backend.plan(rows, layer, {})
        return backend.forward(q, None, None, replace(cache, page_size=page_size, tensors=tensors), plan)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_prompt_may_be_cut_anywhere(monkeypatch: pytest.MonkeyPatch, window: int | None, page_size: int) -> None:
    """Threads and chunks do not change a bit; pages may be shorter than a vector."""
    monkeypatch.setattr("pegboard_cpu.attention._ENOUGH", 1)
    q = normal(600, 6, 64, seed=2).float()
    whole = fill(1, q, 0, window=window)
    keys, values = (x.flatten(0, 1)[:600].double() for x in cache_of().tensors.values())
    scores = torch.einsum("qkgd,ekd->kgqe", q.double().view(600, 2, 3, 64), keys) * LAYER.scale
    seen = torch.ones(600, 600, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    exact = torch.einsum("kgqe,ekd->qkgd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values).flatten(1, 2)
    torch.testing.assert_close(whole.double(), exact, rtol=2e-5, atol=2e-5)
    for threads, cuts in ((2, (0, 600)), (3, (0, 1, 34, 300, 555, 600)), (11, (0, 256, 600))):
        parts = [fill(threads, q[a:b], a, page_size, window=window) for a, b in pairwise(cuts)]
        assert same_bits(torch.cat(parts), whole)


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
    assert not NumbaAttention.refusals(PREFILL, None)
    for phase in ("prefill", "decode"):
        [found] = NumbaAttention.refusals(replace(NEED, phase=phase, **change), None)
        assert reason in found


def test_wrong_calls_are_named() -> None:
    backend = NumbaAttention.create(NEED, None)
    plan = backend.plan(step((5,)), LAYER, {})
    with pytest.raises(PegboardError, match="the plan is for"):
        backend.forward(torch.zeros(2, 6, 64), None, None, cache_of(), plan)
    with pytest.raises(PegboardError, match="sinks without need"):
        backend.forward(torch.zeros(1, 6, 64), None, None, cache_of(), plan, torch.zeros(6))
