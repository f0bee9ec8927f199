"""Products with tiled 4-bit weights against float64: on a CUDA device, and on CPU under Triton's interpreter.

The interpreter is chosen when a kernel is defined, so it has a process of its own (`test_under_the_interpreter`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard_quant.int4.layout import tile, tiled_bytes, untile
from pegboard_quant.packed.codes import pack, unpack
from pegboard_quant.packed.weight import PackedWeight, dense

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
#: On a CUDA device, or under the interpreter.
RUNS = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu
FLOATS = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
#: outputs, inputs, group
SHAPES = [(64, 256, 128), (72, 128, 32), (200, 192, 64), (136, 320, 320), (128, 256, 256)]


def weight_of(
    rows: int, columns: int, group: int, *, zeros: bool, scale: torch.dtype = torch.float16, order: bool = False
) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    groups = -(-columns // group)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    return PackedWeight(
        bits=4,
        in_features=columns,
        group=group,
        codes=pack(codes, 4).to(DEVICE),
        scales=(torch.rand(rows, groups, generator=generator) * 0.02 + 0.002).to(scale).to(DEVICE),
        zeros=torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.uint8).to(DEVICE)
        if zeros
        else None,
        order=torch.randperm(columns, generator=generator).int().to(DEVICE) if order else None,
    )


def shifted_weight(rows: int, columns: int, group: int) -> PackedWeight:
    """scale * code + offset"""
    weight = weight_of(rows, columns, group, zeros=False)
    generator = torch.Generator().manual_seed(rows)
    offsets = torch.randn(weight.scales.shape, generator=generator).to(torch.float16) * 0.1
    return replace(weight, offsets=offsets.to(DEVICE))


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def launcher() -> Any:
    from pegboard_quant.int4.launching import Int4Launcher

    return Int4Launcher(torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0), interpreted=INTERPRETED)


def assert_right(
    weight: PackedWeight, rows: int, dtype: torch.dtype, bias: bool = False, cut: Any = None, adds: bool = False
) -> None:
    x = random(rows, weight.in_features, dtype=dtype)
    add = random(weight.shape[0], dtype=dtype) if bias else None
    right = x.double() @ dense(weight, torch.float64).T
    right = right if add is None else right + add.double()
    out = torch.full((rows, weight.shape[0] + 8), torch.nan, dtype=dtype, device=DEVICE)
    made = launcher()
    part = out[:, : weight.shape[0]]
    if adds:
        part.copy_(random(rows, weight.shape[0], dtype=dtype))
        right = right + part.double()
    if cut is None:
        made.multiply(x, tile(weight), add, part, adds=adds)
    else:
        made.multiply_as(x, tile(weight), add, part, cut, adds=adds)
    assert out[:, weight.shape[0] :].isnan().all(), "nothing beyond the outputs is written"
    error = (part.double() - right).abs().max() / right.abs().max()
    assert error <= {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
@pytest.mark.parametrize("zeros", [True, False])
def test_tiling_loses_nothing(rows: int, columns: int, group: int, zeros: bool) -> None:
    weight = weight_of(rows, columns, group, zeros=zeros, order=zeros)
    tiled = tile(weight)
    back = untile(tiled)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scales, weight.scales)
    assert torch.equal(dense(back, torch.float64), dense(weight, torch.float64))
    assert tiled.nbytes == tiled_bytes(rows, columns, group, ordered=zeros)


def test_tiling_keeps_offsets() -> None:
    weight = shifted_weight(72, 192, 32)
    back = untile(tile(weight))
    assert back.offsets is not None
    assert back.zeros is None
    assert torch.equal(back.offsets, weight.offsets)
    assert torch.equal(back.codes, weight.codes)
    codes = unpack(weight.codes, 4, 192).double()
    steps = [part.double().repeat_interleave(32, 1) for part in (weight.scales, weight.offsets)]
    assert torch.equal(dense(back, torch.float64), codes * steps[0] + steps[1])


@RUNS
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", FLOATS)
def test_products_with_offsets(rows: int, group: int, dtype: torch.dtype) -> None:
    weight = shifted_weight(200, 192, group)
    assert_right(weight, rows, dtype, bias=rows == 5)
    right = dense(weight, torch.float32).to(dtype)
    assert torch.equal(launcher().dequantise(tile(weight), dtype), right)


@RUNS
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_products(rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    weight = weight_of(outputs, inputs, group, zeros=rows != 5, order=rows == 16, scale=torch.float16)
    assert_right(weight, rows, dtype, bias=rows != 1)


@RUNS
@pytest.mark.parametrize(
    ("group", "rows"),
    [
        *((128, rows) for rows in (1, 3, 7, 40, 100, 300, 1100)),
        *((32, rows) for rows in (1, 7, 300)),
        *(pytest.param(32, rows, marks=pytest.mark.full if INTERPRETED else ()) for rows in (3, 40, 100, 1100)),
    ],
)
def test_sums_with_a_residual(rows: int, group: int) -> None:
    from pegboard_quant.int4.cuts import Cut

    weight = weight_of(200, 640, group, zeros=True)
    for dtype in FLOATS:
        assert_right(weight, rows, dtype, bias=rows == 3, adds=True)
        if rows == 7:
            assert_right(weight, rows, dtype, cut=Cut(64, 16, 3, 3), adds=True)


def legal(weight: PackedWeight, rows: int, blocks: tuple[int, int, int, int], **fields: Any) -> Any:
    """Such a cut, for which there are counters."""
    from pegboard_quant.int4.cuts import Cut
    from pegboard_quant.int4.legal import Place, illegal

    cut = Cut(*blocks, **fields)
    place = Place(outputs=weight.shape[0], inputs=weight.in_features, group=weight.group, rows=rows)
    assert illegal(cut, place, (9, 0)) is None
    return cut


@RUNS
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("spread", [False, True])
def test_sums_in_parts(block_n: int, spread: bool) -> None:
    from pegboard_quant.int4.cuts import Cut

    weight = weight_of(200, 640, 128, zeros=True, scale=torch.bfloat16)
    for dtype in FLOATS:
        for split in (2, 3, 5):
            assert_right(weight, 7, dtype, bias=True, cut=Cut(block_n, 16, split, 3, spread=spread), adds=split == 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "outputs", "blocks"),
    [
        (64, 4096, (128, 64, 8, 3)),
        (50, 6144, (64, 64, 4, 3)),
        # More programs than run at once, with parts that come long after others
        (64, 4096, (64, 64, 16, 4)),
        (7, 12288, (64, 16, 16, 6)),
    ],
)
def test_programs_add_a_sum_together_on_hopper(rows: int, outputs: int, blocks: tuple[int, int, int, int]) -> None:
    packed = weight_of(outputs, 4096, 128, zeros=True, scale=torch.bfloat16)
    alone, spread = (legal(packed, rows, blocks, fetched=2, early=True, spread=how) for how in (False, True))
    weight = tile(packed)
    x, busy = random(rows, 4096, dtype=torch.bfloat16), random(1024, 1024, dtype=torch.bfloat16)
    right, other = torch.empty(rows, outputs, dtype=x.dtype, device=DEVICE), torch.cuda.Stream()
    launcher().multiply_as(x, weight, None, right, alone)
    torch.cuda.synchronize()
    for turn in range(100):
        out = torch.full_like(right, torch.nan)
        if turn >= 50:  # what else runs there delays some programs, and keeps some from starting
            with torch.cuda.stream(other):
                for _ in range(turn % 5):
                    busy @ busy
        launcher().multiply_as(x, weight, None, out, spread)
        assert torch.equal(out, right), "whoever adds a piece, it is the same"
    torch.cuda.synchronize()
    assert not weight.counters.any()


@RUNS
@pytest.mark.parametrize(
    ("rows", "block_n", "whole", "head"), [(7, 64, 0, 2), (16, 64, 1, 4), (3, 64, 3, 1), (20, 128, 1, 3)]
)
def test_sums_of_some_outputs_in_two_parts(rows: int, block_n: int, whole: int, head: int) -> None:
    weight = weight_of(200, 640, 128, zeros=True, scale=torch.bfloat16)
    cut = legal(weight, rows, (block_n, 16, 1, 3), whole=whole, head=head)
    for dtype in FLOATS:
        assert_right(weight, rows, dtype, bias=True, adds=head == 4, cut=cut)


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_some_outputs_in_two_parts_on_hopper(block_n: int, block_m: int) -> None:
    weight = weight_of(1032, 4096 + 384, 128, zeros=True, scale=torch.bfloat16)
    for rows in (block_m - 11, block_m if block_n == 64 else block_m + 1):
        cut = legal(weight, rows, (block_n, block_m, 1, 4), fetched=2, early=True, whole=3, head=28)
        for dtype in FLOATS:
            assert_right(weight, rows, dtype, bias=True, adds=rows >= block_m, cut=cut)


@RUNS
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_dequantised_weights_are_rounded_once(outputs: int, inputs: int, group: int) -> None:
    weight = weight_of(outputs, inputs, group, zeros=True)
    for dtype in FLOATS:
        right = dense(weight, torch.float32).to(dtype)
        assert torch.equal(launcher().dequantise(tile(weight), dtype), right)


@RUNS
def test_many_rows() -> None:
    for dtype in FLOATS:
        assert_right(weight_of(72, 128, 32, zeros=True), 300, dtype, bias=True)
        assert_right(weight_of(72, 128, 64, zeros=False), 100, dtype)


#: outputs, inputs, group: whole tiles of groups, odd numbers of tiles, outputs and inputs that fill no tile
WHOLE_GROUPS = [(64, 256, 128), (200, 640, 128), (1032, 904, 904), (136, 1536, 256), (256, 4096, 128), (6144, 384, 384)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 4, 65, 128, 130, 300])
@pytest.mark.parametrize(("outputs", "inputs", "group"), WHOLE_GROUPS)
def test_products_of_few_and_many_rows(rows: int, outputs: int, inputs: int, group: int) -> None:
    weight = weight_of(outputs, inputs, group, zeros=rows != 3, order=rows == 128, scale=torch.float16)
    for dtype in FLOATS:
        assert_right(weight, rows, dtype, bias=rows % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("warps", [2, 4, 8, 16])
def test_held_words_are_asked_for_in_any_order(block_n: int, warps: int) -> None:
    from pegboard_quant.int4.cuts import HeldCut

    weight = weight_of(328, 4096, 128, zeros=True, scale=torch.bfloat16)
    for rows in (1, 4):
        for ahead in (1, 2):
            assert_right(weight, rows, torch.bfloat16, cut=HeldCut(block_n, warps, ahead))


#: block_n, split, depth, copied, stages: with rests of parts and of bodies, and without
STREAMED = [(64, 1, 4, 2, 2), (64, 4, 4, 1, 3), (128, 3, 2, 1, 2), (128, 2, 4, 4, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("digits", [True, False])
@pytest.mark.parametrize("cut", STREAMED)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(1032, 4096, 128), (328, 2048 + 392, 256), (136, 4096, 4096), (72, 128, 128)]
)
def test_words_stream_through_registers(
    cut: tuple[int, int, int, int, int], digits: bool, outputs: int, inputs: int, group: int
) -> None:
    from pegboard_quant.int4.cuts import StreamedCut
    from pegboard_quant.int4.legal import Place, illegal

    made = StreamedCut(cut[0], min(cut[1], -(-inputs // 128)), *cut[2:], digits)
    weight = weight_of(outputs, inputs, group, zeros=group != 4096, scale=torch.float16)
    for rows in (1, 5, 8, 9, 16):
        place = Place(outputs=outputs, inputs=inputs, group=group, rows=rows)
        assert illegal(made, place, (9, 0)) is None
        for dtype in FLOATS:
            assert_right(weight, rows, dtype, bias=rows != 8, adds=rows > 8, cut=made)


@pytest.mark.gpu
@pytest.mark.parametrize("digits", [True, False])
def test_streamed_parts_repeat_bit_for_bit(digits: bool) -> None:
    from pegboard_quant.int4.cuts import StreamedCut

    weight, cut = weight_of(4096, 14336, 128, zeros=True), StreamedCut(64, 7, 4, 2, 2, digits)
    tiled, made, x = tile(weight), launcher(), random(8, 14336, dtype=torch.bfloat16)
    out = torch.empty(8, 4096, dtype=torch.bfloat16, device=DEVICE)
    made.multiply_as(x, tiled, None, out, cut)
    first = out.clone()
    for _ in range(50):
        out.fill_(torch.nan)
        made.multiply_as(x, tiled, None, out, cut)
        assert torch.equal(out, first)
    assert not tiled.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("inputs", [256, 392, 14336])
@pytest.mark.parametrize("dtype", FLOATS)
def test_digits_are_those_of_x(rows: int, inputs: int, dtype: torch.dtype) -> None:
    """By their definition, for rows of any size, with zeros and beside numbers that are not finite."""
    sizes = torch.tensor([0.01, 1, 100, 0.1, 10]).repeat(4)[:rows, None].to(DEVICE, dtype)
    x = random(rows, inputs, dtype=dtype) * sizes
    x[:, 128:136] = 0
    x[0, 3] *= 900
    x[rows // 2, 128:256] = 0
    if rows > 1:
        x[1, 200] = torch.nan
    tiles, columns = -(-inputs // 128), 8 if rows <= 8 else 16
    digits, factors = launcher()._digits(x.contiguous(), tiles, columns)
    made = digits.view(tiles, 2, columns, 4, 16, 2)[:, :, :rows].transpose(4, 5).reshape(tiles, 2, rows, 128).double()
    numbers = made[:, 0] * 256 + made[:, 1]
    factor, summed = factors[:, 0, :rows].double(), factors[:, 1, :rows].double()
    whole = torch.nn.functional.pad(x.double(), (0, -inputs % 128)).view(rows, tiles, 128).transpose(0, 1)
    bad = whole.isnan().any(2)
    assert torch.equal(factor.isnan(), bad)
    assert torch.equal(summed.isnan(), bad)
    most = whole.abs().amax(2)[~bad]
    error = (numbers * factor[..., None] - whole)[~bad].abs().amax(1)
    assert (error <= most * 2.0**-15).all()
    torch.testing.assert_close(summed[~bad], (numbers * factor[..., None]).sum(2)[~bad], rtol=1e-5, atol=1e-30)


@pytest.mark.gpu
@pytest.mark.parametrize(("fetched", "early"), [(1, False), (2, True), (4, True), (0, True)])
def test_tiles_may_be_asked_for_before_x(fetched: int, early: bool) -> None:
    from pegboard_quant.int4.cuts import Cut

    weight = weight_of(1032, 640, 128, zeros=True)
    for split in (1, 3):
        assert_right(weight, 16, torch.bfloat16, bias=True, cut=Cut(128, 16, split, 3, False, fetched, early))


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("block_m", [128, 256])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_many_rows_in_blocks_and_parts(block_n: int, block_m: int, split: int) -> None:
    from pegboard_quant.int4.cuts import Cut

    weight = weight_of(1032, 4096 + 384, 128, zeros=True, scale=torch.bfloat16)
    for rows in (80, 256):
        if split == 1 or block_n == 128 or block_m >= rows:
            assert_right(weight, rows, torch.bfloat16, bias=True, cut=Cut(block_n, block_m, split, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("split", [1, 3])
def test_few_rows_with_the_next_tile_unpacked_meanwhile(block_n: int, block_m: int, split: int) -> None:
    from pegboard_quant.int4.cuts import Cut

    weight = weight_of(1032, 4096 + 384, 128, zeros=True, scale=torch.bfloat16)
    for rows in (block_m - 11, block_m):
        for dtype in FLOATS:
            assert_right(weight, rows, dtype, bias=True, cut=Cut(block_n, block_m, split, 3, True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 33, 64, 128, 256])
@pytest.mark.parametrize("group", [32, 128])
def test_graphs_repeat_bit_for_bit(rows: int, group: int) -> None:
    weight = weight_of(1032, 2048, group, zeros=True)
    tiled, made = tile(weight), launcher()
    x = random(rows, 2048, dtype=torch.bfloat16)
    out = torch.empty(rows, 1032, dtype=torch.bfloat16, device=DEVICE)
    made.multiply(x, tiled, None, out)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.multiply(x, tiled, None, out)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)
    assert not tiled.counters.any()


@pytest.mark.skipif(INTERPRETED, reason="is what runs it")
@pytest.mark.long
def test_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__)), "-k", _INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


_INTERPRETED = "products or residual or parts or dequantised or many"
