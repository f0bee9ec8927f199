"""Every layout, read bit for bit: against tensors that were written from the formats' definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.errors import CheckpointError
from pegboard.testing.oracles import packed as written
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint
from pegboard_quant.int4.layout import TiledWeight
from pegboard_quant.packed.linear import GroupLinear
from pegboard_quant.packed.quantizers import (
    AwqQuantizer,
    CompressedTensorsQuantizer,
    GptqQuantizer,
    PackedQuantizer,
)
from pegboard_quant.packed.reading import read_packed
from pegboard_quant.packed.weight import PackedWeight, dense


def numbers(*shape: int, below: int, seed: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def made(rows: int, columns: int, group: int, bits: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points (0, 7, 8 and 15 among them) and scales of many sizes."""
    groups = 1 if group == -1 else -(-columns // group)
    codes = numbers(rows, columns, below=1 << bits, seed=seed)
    zeros = numbers(rows, groups, below=1 << bits, seed=seed + 1)
    zeros.view(-1)[:4] = torch.tensor([0, 7, 8, 15])
    scales = torch.rand(rows, groups, generator=torch.Generator().manual_seed(seed + 2)).mul(3).exp().div(64).half()
    return codes, zeros, scales


def quantizer(kind: type[PackedQuantizer], scheme: Mapping[str, Any], dtype: str = "float32") -> PackedQuantizer:
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype=dtype, scheme=scheme)
    assert not kind.refusals(need, None)
    return kind.create(need, None)


def read(made: PackedQuantizer, tensors: Mapping[str, Tensor], rows: int, columns: int, **changes: Any) -> PackedWeight:
    spec = LinearSpec(name="m", sources=("m",), in_features=columns, out_features=(rows,), **changes)
    stored = MemoryCheckpoint({f"m.{suffix}": tensor for suffix, tensor in tensors.items()})
    linear = made.linear(spec, stored, Shard())
    assert isinstance(linear, GroupLinear)
    (piece,) = linear.pieces
    assert isinstance(piece, PackedWeight)
    return piece


def awq_config(group: int = 32, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | changes


def gptq_config(group: int = 32, bits: int = 4, **changes: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False}
    return config | {"checkpoint_format": "gptq_v2"} | changes


def compressed_config(group: int = 32, bits: int = 4, **weights: Any) -> dict[str, Any]:
    settings = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    if group == -1:
        settings |= {"strategy": "channel", "group_size": None}
    tables = {"group_0": {"targets": ["Linear"], "weights": settings | weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": tables, "ignore": []}


#: columns, group: whole groups, a last one that is shorter, one of all.
SHAPES = [(96, 32), (128, 128), (80, 32), (200, 128), (72, -1)]


@pytest.mark.parametrize(("columns", "group"), SHAPES)
def test_awq(columns: int, group: int) -> None:
    codes, zeros, scales = made(24, columns, group, 4)
    found = read(quantizer(AwqQuantizer, awq_config(group)), written.awq(codes, zeros, scales), 24, columns)
    exact = written.meant(codes, zeros, scales, written.runs(columns, group))
    assert torch.equal(dense(found).double(), exact)
    assert torch.equal(dense(found, torch.float64), exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(("columns", "group"), SHAPES)
def test_gptq(columns: int, group: int, bits: int, version: int, indexed: bool) -> None:
    codes, zeros, scales = made(16, columns, group, bits)
    runs = written.runs(columns, group)
    tensors = written.gptq(codes, zeros, scales, bits, version, runs if indexed else None)
    config = gptq_config(group, bits, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    found = read(quantizer(GptqQuantizer, config), tensors, 16, columns)
    assert torch.equal(dense(found).double(), written.meant(codes, zeros, scales, runs))


@pytest.mark.parametrize("kind", [AwqQuantizer, GptqQuantizer])
@pytest.mark.parametrize("partition", ["output", "input"])
@pytest.mark.parametrize(
    ("bits", "ordered", "outputs"), [(4, False, (256, 80, 64)), (4, True, (256, 64)), (8, False, (64,))]
)
def test_shapes_of_kernels_are_those_of_what_is_tiled(
    kind: type[PackedQuantizer], partition: Any, bits: int, ordered: bool, outputs: tuple[int, ...]
) -> None:
    """Sources of whole tiles are one product with the next, orders of columns part them, and 8 bits have no kernel."""
    if kind is AwqQuantizer and (bits == 8 or ordered):
        pytest.skip("AWQ has neither")
    tensors: dict[str, Tensor] = {}
    for index, rows in enumerate(outputs):
        codes, zeros, scales = made(rows, 256, 64, bits, seed=index)
        if kind is AwqQuantizer:
            stored = written.awq(codes, zeros, scales)
        else:
            shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(index))
            group_of = written.runs(256, 64)
            stored = written.gptq(codes, zeros, scales, bits, 2, group_of[shuffled] if ordered else group_of)
        tensors |= {f"s{index}.{suffix}": tensor for suffix, tensor in stored.items()}
    sources = tuple(f"s{index}" for index in range(len(outputs)))
    spec = LinearSpec(name="m", sources=sources, in_features=256, out_features=outputs, partition=partition, unit=8)
    config = awq_config(64) if kind is AwqQuantizer else gptq_config(64, bits, desc_act=ordered)
    checkpoint, quantized = MemoryCheckpoint(tensors), quantizer(kind, config)
    for shard in (Shard(), Shard(rank=1, size=2, all_reduce=lambda x: x)):
        layouts = quantized._layouts(spec, checkpoint.tensors())
        parts = read_packed(spec, layouts, checkpoint, shard, "float32", "cpu", tiled=True)
        tiled = [piece for piece in parts.weight.pieces if isinstance(piece, TiledWeight)]
        found = quantized.kernel_shapes(spec, checkpoint.tensors(), shard)
        assert found == [(*piece.shape, piece.group) for piece in tiled]
        assert bool(found) == (bits == 4 and not (ordered and partition == "input" and shard.size == 2))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "group"), SHAPES)
def test_gptq_act_order(columns: int, group: int, bits: int) -> None:
    codes, zeros, scales = made(16, columns, group, bits)
    group_of = written.runs(columns, group)[torch.randperm(columns, generator=torch.Generator().manual_seed(4))]
    tensors = written.gptq(codes, zeros, scales, bits, 2, group_of)
    found = read(quantizer(GptqQuantizer, gptq_config(group, bits, desc_act=True)), tensors, 16, columns)
    assert torch.equal(dense(found).double(), written.meant(codes, zeros, scales, group_of))
    assert found.order is not None, "sorted by group, columns are runs of whole groups: what kernels want"
    assert found.groups is None


def test_groups_of_any_size_are_read_too() -> None:
    codes, zeros, scales = made(8, 64, 32, 4)
    group_of = numbers(64, below=2, seed=9)
    tensors = written.gptq(codes, zeros, scales, 4, 2, group_of)
    found = read(quantizer(GptqQuantizer, gptq_config(desc_act=True)), tensors, 8, 64)
    assert torch.equal(dense(found).double(), written.meant(codes, zeros, scales, group_of))
    assert found.groups is not None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeroed", ["symmetric", "packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "group"), [*SHAPES, (77, 32)])
def test_compressed_tensors(columns: int, group: int, bits: int, zeroed: str, dtype: torch.dtype) -> None:
    codes, zeros, scales = made(20, columns, group, bits)
    scales = scales.to(dtype)
    stored = None if zeroed == "symmetric" else zeros
    tensors = written.compressed(codes, stored, scales, bits, packs_zeros=zeroed == "packed")
    config = compressed_config(group, bits, symmetric=zeroed == "symmetric")
    found = read(quantizer(CompressedTensorsQuantizer, config), tensors, 20, columns)
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if stored is None else zeros
    assert torch.equal(dense(found, torch.float64), written.meant(codes, zeros, scales, written.runs(columns, group)))


@pytest.mark.parametrize("actorder", ["group", "weight", None])
def test_compressed_tensors_actorder(actorder: str | None) -> None:
    codes, zeros, scales = made(16, 96, 32, 4)
    runs = written.runs(96, 32)
    group_of = runs[torch.randperm(96, generator=torch.Generator().manual_seed(4))] if actorder == "group" else runs
    tensors = written.compressed(codes, zeros, scales, 4, group_of if actorder == "group" else None)
    config = compressed_config(symmetric=False, actorder=actorder)
    found = read(quantizer(CompressedTensorsQuantizer, config), tensors, 16, 96)
    assert torch.equal(dense(found).double(), written.meant(codes, zeros, scales, group_of))


@pytest.mark.parametrize("version", [1, 2])
def test_the_lowest_and_highest_zero_points(version: int) -> None:
    """Version 1 stores 0 as 15."""
    codes, _, scales = made(16, 64, 32, 4)
    for zero in (0, 7, 8, 15):
        zeros = torch.full_like(scales, zero).long()
        tensors = written.gptq(codes, zeros, scales, 4, version)
        config = gptq_config(checkpoint_format="gptq" if version == 1 else "gptq_v2")
        found = read(quantizer(GptqQuantizer, config), tensors, 16, 64)
        assert found.zeros is not None
        assert (found.zeros == zero).all()
        assert torch.equal(dense(found).double(), written.meant(codes, zeros, scales, written.runs(64, 32)))


def test_the_words_of_a_known_matrix() -> None:
    """The definitions themselves, by hand: outputs 0 to 7 hold the codes 0 to 7."""
    codes = torch.arange(8)[:, None].expand(8, 8)
    tensors = written.awq(codes, codes[:, :1], torch.ones(8, 1))
    assert tensors["qweight"].tolist() == [[0x75316420]] * 8
    assert written.gptq(codes.T, codes[:, :1], torch.ones(8, 1), 4, 2)["qweight"].tolist() == [[0x76543210] * 8]
    assert written.compressed(codes.T, None, torch.ones(8, 1), 4)["weight_packed"].tolist() == [[0x76543210]] * 8
    assert written.gptq(codes, codes[:, :1], torch.ones(8, 1), 4, 1)["qzeros"].tolist() == [[0x6543210F]]


# -- parts of a matrix


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("column", "columns"), [(0, 64), (32, 64), (48, 96), (16, 16), (40, 24), (1, 191)])
def test_any_columns_of_any_groups(column: int, columns: int, ordered: bool) -> None:
    """A rank's columns may begin within a group, and have no whole groups at all."""
    from pegboard_quant.packed.gptq import GptqLayout
    from pegboard_quant.packed.reading import _cut, held_bytes

    codes, zeros, scales = made(16, 192, 32, 4)
    group_of = written.runs(192, 32)
    if ordered:
        group_of = group_of[torch.randperm(192, generator=torch.Generator().manual_seed(1))]
    layout = GptqLayout(bits=4, group=32, zeros=True, ordered=ordered, version=2)
    tensors = written.gptq(codes, zeros, scales, 4, 2, group_of)
    stored = MemoryCheckpoint({f"m.{suffix}": tensor for suffix, tensor in tensors.items()})
    whole = layout.read(stored, "m", 16, 192)
    found = _cut(whole, layout, 192, (4, 8), (column, columns))
    exact = written.meant(codes, zeros, scales, group_of)[4:12, column : column + columns]
    assert torch.equal(dense(found).double(), exact)
    assert found.nbytes == held_bytes(layout, 192, 8, (column, columns), 2)


# -- what is wrong with a file


def test_a_config_that_denies_the_order_of_the_file() -> None:
    codes, zeros, scales = made(16, 64, 32, 4)
    tensors = written.gptq(codes, zeros, scales, 4, 2, written.runs(64, 32).flip(0))
    with pytest.raises(CheckpointError, match=r"m\.g_idx puts columns into groups out of order; desc_act"):
        read(quantizer(GptqQuantizer, gptq_config()), tensors, 16, 64)
    tensors["g_idx"] = torch.full((64,), 2, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"m\.g_idx names groups outside of 0 to 1"):
        read(quantizer(GptqQuantizer, gptq_config(desc_act=True)), tensors, 16, 64)


def test_wrong_types_and_shapes_are_all_named() -> None:
    codes, zeros, scales = made(16, 64, 32, 4)
    tensors = written.awq(codes, zeros, scales)
    tensors["qweight"] = tensors["qweight"].long()
    tensors["scales"] = tensors["scales"][:1]
    with pytest.raises(CheckpointError) as error:
        read(quantizer(AwqQuantizer, awq_config()), tensors, 16, 64)
    assert "m.qweight is stored as int64, expected int32" in str(error.value)
    assert "m.scales has shape (1, 16), expected (2, 16)" in str(error.value)
    tensors = written.compressed(codes, None, scales, 4)
    tensors["weight_shape"] = torch.tensor([16, 65])
    with pytest.raises(CheckpointError, match=r"m\.weight_shape says \[16, 65\], expected \[16, 64\]"):
        read(quantizer(CompressedTensorsQuantizer, compressed_config()), tensors, 16, 64)
