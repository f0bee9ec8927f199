"""What FlashDecoding compiles to, on machines without a GPU: nothing spills, copies and matmuls are the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard.dtypes import torch_dtype
from pegboard_attention.flash_decoding import FlashDecoding


def launch(
    capability: int,
    *,
    rows: int = 1,
    length: int = 8192,
    queries: int = 1,
    size: int = 128,
    page: int = 64,
    kv: str = "bfloat16",
    tree: bool = False,
    **layer_facts: Any,
) -> None:
    """One step of one layer over tensors without meaning."""
    layer = AttentionLayer(query_heads=32, kv_heads=8, head_size=size, scale=0.1, **layer_facts)
    need = AttentionNeed(
        device=DeviceFacts(type="cuda", capability=divmod(capability, 10)),
        dtype="bfloat16",
        kv_dtype=kv,
        page_size=page,
        layers=(layer,),
        phase="decode",
        max_query=queries,
        max_rows=rows,
        max_length=length,
        ancestors=tree,
    )
    assert not FlashDecoding.refusals(need, None)
    backend = FlashDecoding(need, multiprocessors=132)
    layout = FlashDecoding.layouts(need, layer, None)[0]
    tensors = {spec.name: torch.empty((4, *spec.shape), dtype=torch_dtype(spec.dtype)) for spec in layout.tensors}
    tokens = rows * queries
    step = Rows(
        query_start=torch.zeros(rows + 1, dtype=torch.int32),
        kv_len=torch.zeros(rows, dtype=torch.int32),
        page_table=torch.zeros(rows, length // page, dtype=torch.int32),
        row_slot=torch.zeros(rows, dtype=torch.int64),
        ancestors=torch.zeros(tokens, dtype=torch.int64) if tree else None,
        bounds=Bounds(rows=rows, tokens=tokens, max_query=queries, min_query=queries, max_kv=length),
    )
    workspace = {spec.name: torch.empty(spec.shape) for spec in backend.workspace()}
    q = torch.empty(tokens, 32, size, dtype=torch.bfloat16)
    sinks = torch.empty(32) if layer.sinks else None
    cache = LayerCache(layout=layout, group=0, page_size=page, tensors=tensors)
    backend.forward(q, None, None, cache, backend.plan(step, layer, workspace), sinks)


#: (capability, what is launched); the others at full counts
CASES: list[tuple[int, dict[str, Any]]] = [
    (90, {"page": 64}),
    (90, {"page": 16}),
    (80, {"page": 16}),
    (90, {"queries": 60, "tree": True}),
    (90, {"kv": "int8"}),
    (90, {"kv": "float8_e4m3fn", "page": 16}),
]
MORE: list[dict[str, Any]] = [
    {"rows": 64, "length": 1024},
    {"size": 256, "page": 16},
    {"size": 256},
    {"size": 96, "window": 4096, "softcap": 30.0, "sinks": True},
    {"queries": 8},
    {"queries": 60, "tree": True, "size": 256},
    {"kv": "int8", "page": 16},
    {"kv": "float8_e4m3fn"},
    {"kv": "int8", "queries": 64},
]


def named(case: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(
    ("capability", "case"),
    [*CASES, *(pytest.param(cc, case, marks=pytest.mark.full) for cc in (80, 90) for case in MORE)],
    ids=named,
)
def test_machine_code(compile_for: Callable[..., Any], capability: int, case: dict[str, Any]) -> None:
    with compile_for(capability) as made:
        launch(capability, **case)
    kernels = [found.kernel for found in made]
    split = case.get("rows", 1) == 1
    assert kernels == (["schedule_items", "attend_items", "merge_splits"] if split else ["attend_items"])
    for found in made:
        assert found.stack == 0
        assert found.instructions["LDL"] == found.instructions["STL"] == 0
    attend = next(found for found in made if found.kernel == "attend_items")
    instructions = attend.instructions
    assert instructions["HMMA"] + instructions["HGMMA"] > 0
    dense = capability == 90 and case.get("page", 64) == 64 and case.get("size", 128) in (64, 128, 256)
    assert (instructions["UTMALDG"] > 0) == dense, "pages of a tile or more come through one descriptor load"
    assert dense or instructions["LDGSTS"] > 0, "shorter ones through asynchronous copies"
    assert attend.shared <= 113 * 1024, "two programs fit a multiprocessor"
    if "kv" in case:
        # Bytes go from shared memory to the matmul in registers: loaded as fragments, widened without conversions
        assert instructions["LDSM"] >= 8
        assert instructions["I2F"] + instructions["I2FP"] < 16
