from __future__ import annotations

import pytest
import streaming_attention
import torch
from pydantic import ValidationError
from streaming_attention.backend import StreamingAttention
from streaming_attention.options import Options
from torch import Tensor

from pegboard import SamplingParams
from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard.testing import AttentionSuite, isolated_engine

PART = streaming_attention.pegboard_parts()[0]
PAGE = 16


class TestExact(AttentionSuite):
    """The contract, with a window that no text outgrows: then it is exact attention."""

    part = PART
    options = {"window": 1 << 20}
    dtypes = ("float32", "bfloat16")
    claims = ("verify", "batch_invariant")


class TestNothingButSinks(AttentionSuite):
    """Exact, too: all entries of the suite's texts are sinks, and windows hold the query alone."""

    part = PART
    options = {"window": 1, "sinks": 1 << 20}


def attend(length: int, count: int, *, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """What the backend makes of the last `count` queries of `length` entries, and the definition in float64. NaN
    stands in every entry that none of them may see."""
    draw = torch.Generator().manual_seed(length)
    q = torch.randn(count, 4, 32, generator=draw)
    pages = -(-length // PAGE)
    table = torch.randperm(pages, generator=draw).int() + 1  # page 0 is nobody's
    k, v = (torch.randn(pages + 1, PAGE, 2, 32, generator=draw) for _ in range(2))
    entry = [int(table[e // PAGE]) * PAGE + e % PAGE for e in range(length)]
    sees = [[e <= p and (e < sinks or e > p - window) for e in range(length)] for p in range(length - count, length)]
    visible = torch.tensor(sees)
    for cached in (k, v):
        cached.view(-1, 2, 32)[[entry[e] for e in range(length) if not visible[:, e].any()]] = torch.nan
    layer = AttentionLayer(query_heads=4, kv_heads=2, head_size=32, scale=32**-0.5)
    need = AttentionNeed(
        device=DeviceFacts(type="cpu"),
        dtype="float32",
        kv_dtype="float32",
        page_size=PAGE,
        layers=(layer,),
        phase="prefill",
        max_query=64,
        max_rows=4,
        max_length=512,
    )
    options = Options(sinks=sinks, window=window)
    assert StreamingAttention.refusals(need, options) == []
    backend = StreamingAttention.create(need, options)
    (layout,) = backend.layouts(need, layer, options)
    rows = Rows(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        kv_len=torch.tensor([length], dtype=torch.int32),
        page_table=table[None],
        row_slot=torch.zeros(1, dtype=torch.int64),
        ancestors=None,
        bounds=Bounds(rows=1, tokens=count, max_query=count, min_query=count, max_kv=length),
    )
    cache = LayerCache(layout=layout, group=0, page_size=PAGE, tensors={"k": k, "v": v})
    found = backend.forward(q, None, None, cache, backend.plan(rows, layer, {}))

    keys, values = (cached.view(-1, 2, 32)[entry].nan_to_num().double() for cached in (k, v))
    keys, values = keys.repeat_interleave(2, dim=1), values.repeat_interleave(2, dim=1)  # [L, H, D]
    scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * layer.scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return found, torch.einsum("hnl,lhd->nhd", weights, values)


@pytest.mark.parametrize(("length", "count"), [(5, 1), (40, 1), (200, 1), (200, 33), (33, 33), (120, 7)])
@pytest.mark.parametrize(("sinks", "window"), [(4, 16), (0, 5), (1, 1), (20, 30)])
def test_a_query_sees_the_first_and_the_latest_entries(length: int, count: int, sinks: int, window: int) -> None:
    found, expected = attend(length, count, sinks=sinks, window=window)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_work_for_a_token_does_not_grow_with_the_text() -> None:
    layer = AttentionLayer(query_heads=1, kv_heads=1, head_size=32, scale=1.0)
    need = AttentionNeed(
        device=DeviceFacts(type="cpu"),
        dtype="float32",
        kv_dtype="float32",
        page_size=PAGE,
        layers=(layer,),
        phase="decode",
        max_query=1,
        max_rows=1,
        max_length=1 << 20,
    )
    backend = StreamingAttention.create(need, Options(sinks=4, window=64))
    for length in (68, 1000, 100_000):
        rows = Rows(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_len=torch.tensor([length], dtype=torch.int32),
            page_table=torch.zeros(1, -(-length // PAGE), dtype=torch.int32),
            row_slot=torch.zeros(1, dtype=torch.int64),
            ancestors=None,
            bounds=Bounds(rows=1, tokens=1, max_query=1, min_query=1, max_kv=length),
        )
        (row,) = backend.plan(rows, layer, {}).rows
        assert len(row.entries) == 68


@pytest.mark.parametrize("wrong", [{"window": 0}, {"sinks": -1}, {"windows": 8}])
def test_options_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Options(**wrong)


def test_an_engine_uses_it(model: str) -> None:
    """Like exact attention while the window holds the text, and unlike it when it doesn't."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [list(range(3, 60)), [5, 6]]

    def run(**settings: object) -> list[tuple[int, ...]]:
        with isolated_engine(model, plugins=[streaming_attention], **settings) as engine:
            return [tuple(output.token_ids) for output in engine.generate(prompts, greedy)]

    exact = run()
    assert run(attention={"use": "streaming", "options": {"window": 200}}) == exact
    narrow = run(attention={"use": "streaming", "options": {"window": 2, "sinks": 1}})
    assert narrow[0] != exact[0]
