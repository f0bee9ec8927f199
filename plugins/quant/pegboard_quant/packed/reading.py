"""This rank's part of packed sources, joined: what `GroupLinear` is made of, and how many bytes that will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Shard
from pegboard.dtypes import ELEMENT_BYTES, element_bytes
from pegboard.errors import CheckpointError
from pegboard.linears import input_part, output_parts, reduction

from ..int4.choice import serves, serves_weight
from ..int4.layout import TILE, TiledWeight, groups_of, tile, tiled_bytes
from .codes import pack, row_bytes, unpack
from .layout import Expected, Layout, SourceWeight, problems_of
from .linear import PackedParts, Pieces
from .weight import PackedWeight


def expected(spec: LinearSpec, layouts: Sequence[Layout | None], names: Mapping[str, Any]) -> dict[str, Expected]:
    """All tensors of the linear; None: a dense source."""
    found: dict[str, Expected] = {}
    for source, rows, layout in zip(spec.sources, spec.out_features, layouts, strict=True):
        if layout is None:
            found[f"{source}.weight"] = Expected((rows, spec.in_features), ())
        else:
            found |= layout.expected(source, rows, spec.in_features, names)
        if spec.bias:
            found[f"{source}.bias"] = Expected((rows,), ())
    return found


def read_packed(
    spec: LinearSpec,
    layouts: Sequence[Layout | None],
    checkpoint: Checkpoint,
    shard: Shard,
    dtype: str,
    device: str,
    *,
    tiled: bool = False,
) -> PackedParts:
    """`tiled`: what the INT4 kernels serve is put in their order.

    CheckpointError for missing and wrong tensors, all of them named; ConfigError for what can't be split."""
    stored = checkpoint.tensors()
    problems = problems_of(expected(spec, layouts, stored), stored)
    if problems:
        raise CheckpointError(f"{spec.name}: {'; '.join(problems)}")
    all_reduce, partition = reduction(spec, shard)
    column, columns = input_part(spec, shard)
    places = output_parts(spec, shard)
    pieces: list[PackedWeight | Tensor] = []
    for source, rows, layout, (start, length) in zip(spec.sources, spec.out_features, layouts, places, strict=True):
        if layout is None:
            weight = checkpoint.read(f"{source}.weight", dtype=dtype, device=device, start=start, length=length)
            pieces.append(weight[:, column : column + columns])
            continue
        whole = layout.read(checkpoint, source, rows, spec.in_features)
        rank = _cut(whole, layout, spec.in_features, (start, length), (column, columns))
        pieces.append(_to(rank, device))
    bias = [
        checkpoint.read(f"{source}.bias", dtype=dtype, device=device, start=start, length=length)
        for source, (start, length) in zip(spec.sources, places, strict=True)
        if spec.bias
    ]
    return PackedParts(
        weight=Pieces(
            pieces=tuple(_tiled(piece, columns == spec.in_features) for piece in _joined(pieces, TILE))
            if tiled
            else tuple(_joined(pieces))
        ),
        bias=torch.cat(bias) if bias else None,
        all_reduce=all_reduce,
        partition=partition,
    )


def packed_bytes(
    spec: LinearSpec,
    layouts: Sequence[Layout | None],
    stored: Mapping[str, TensorInfo],
    shard: Shard,
    dtype: str,
    *,
    tiled: bool = False,
) -> int:
    """What the weights of `read_packed` take, without the bias."""
    column, columns = input_part(spec, shard)
    total = 0
    for source, layout, (_, rows) in zip(spec.sources, layouts, output_parts(spec, shard), strict=True):
        if layout is None:
            total += rows * columns * element_bytes(dtype)
            continue
        scale = _scale_bytes(source, layout, stored)
        total += held_bytes(layout, spec.in_features, rows, (column, columns), scale, tiled=tiled)
    return total


def held_bytes(
    layout: Layout, in_features: int, rows: int, part: tuple[int, int], scale: int, *, tiled: bool = False
) -> int:
    """Bytes of the record of so many rows and this part of the columns, with scales of so many bytes."""
    first, last, runs = _groups(layout, in_features, part)
    size = layout.columns_a_group(in_features)
    if tiled and _is_tiled(layout, in_features, part, scale):
        return tiled_bytes(rows, part[1], size, ordered=layout.ordered)
    numbers = rows * (last - first) * (scale + (1 if layout.zeros else 0))
    return rows * row_bytes(part[1], layout.bits) + numbers + (0 if runs else part[1] * torch.int32.itemsize)


def kernel_shapes(
    spec: LinearSpec, layouts: Sequence[Layout | None], stored: Mapping[str, TensorInfo], shard: Shard
) -> list[tuple[int, int, int]]:
    """(outputs, inputs, columns a group as the kernels see it) of what `read_packed` tiles."""
    part = input_part(spec, shard)
    shapes: list[tuple[int, int, int]] = []
    last: Layout | None = None
    for source, layout, (_, rows) in zip(spec.sources, layouts, output_parts(spec, shard), strict=True):
        if layout is None or not _is_tiled(layout, spec.in_features, part, _scale_bytes(source, layout, stored)):
            last = None
            continue
        if layout == last and not layout.ordered and shapes[-1][0] % TILE == 0:
            rows += shapes.pop()[0]
        shapes.append((rows, part[1], groups_of(part[1], layout.columns_a_group(spec.in_features))[0]))
        last = layout
    return shapes


def _scale_bytes(source: str, layout: Layout, stored: Mapping[str, TensorInfo]) -> int:
    info = stored.get(f"{source}.{layout.scales_name}")
    return ELEMENT_BYTES.get(info.storage, 2) if info is not None else 2  # missing: refused when it is read


def _is_tiled(layout: Layout, in_features: int, part: tuple[int, int], scale: int) -> bool:
    """Whether the kernels read this part of the columns."""
    runs = _groups(layout, in_features, part)[2] or (layout.ordered and part[1] == in_features)
    return runs and serves(layout.bits, part[1], layout.columns_a_group(in_features), scale)


def _groups(layout: Layout, in_features: int, part: tuple[int, int]) -> tuple[int, int, bool]:
    """[first, last) of the groups that these columns need, and whether they are runs that begin with the first."""
    column, columns = part
    size = layout.columns_a_group(in_features)
    if layout.ordered:
        return 0, layout.groups(in_features), False
    first, last = column // size, -(-(column + columns) // size)
    return first, last, column % size == 0 or last - first == 1


def _cut(
    whole: SourceWeight, layout: Layout, in_features: int, rows: tuple[int, int], part: tuple[int, int]
) -> PackedWeight:
    """Rows and columns of a source, columns sorted by group where they are then runs of whole groups."""
    (row, length), (column, columns) = rows, part
    size, bits = layout.columns_a_group(in_features), layout.bits
    first, last, runs = _groups(layout, in_features, part)
    codes = whole.codes[row : row + length]
    order = groups = None
    if not runs:
        all_groups = torch.arange(in_features) // size if whole.group_of is None else whole.group_of
        groups = all_groups[column : column + columns] - first
        if layout.ordered:
            sorted_groups, order = groups.sort(stable=True)
            if torch.equal(sorted_groups, torch.arange(columns) // size):
                groups = None
            else:
                order = None
    if order is not None or column or columns < in_features:
        cut = unpack(codes, bits, in_features)[:, column : column + columns]
        codes = pack(cut if order is None else cut[:, order], bits)
    return PackedWeight(
        bits=bits,
        in_features=columns,
        group=size,
        codes=codes,
        scales=whole.scales[row : row + length, first:last],
        zeros=None if whole.zeros is None else whole.zeros[row : row + length, first:last],
        order=None if order is None else order.int(),
        groups=None if groups is None else groups.int(),
    )


def _to(weight: PackedWeight, device: str) -> PackedWeight:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device).contiguous()

    return PackedWeight(
        bits=weight.bits,
        in_features=weight.in_features,
        group=weight.group,
        codes=weight.codes.to(device).contiguous(),
        scales=weight.scales.to(device).contiguous(),
        zeros=moved(weight.zeros),
        order=moved(weight.order),
        groups=moved(weight.groups),
    )


def _tiled(piece: PackedWeight | Tensor, whole: bool) -> PackedWeight | TiledWeight | Tensor:
    """Whether columns that a rank has of an order are runs is known too late for the memory plan: they stay packed."""
    if isinstance(piece, Tensor) or not serves_weight(piece) or (piece.order is not None and not whole):
        return piece
    return tile(piece)


def _joined(pieces: Sequence[PackedWeight | Tensor], multiple: int = 1) -> list[PackedWeight | Tensor]:
    """Neighbours of one kind become one: fewer products. Orders of columns differ from source to source. A record
    that is followed by another has a multiple of so many rows."""
    joined: list[PackedWeight | Tensor] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(last, Tensor) and isinstance(piece, Tensor):
            joined[-1] = torch.cat((last, piece))
        elif (
            isinstance(last, PackedWeight)
            and isinstance(piece, PackedWeight)
            and (last.shape[0] % multiple == 0 and _kind(last) == _kind(piece))
        ):
            joined[-1] = _cat(last, piece)
        else:
            joined.append(piece)
    return joined


def _kind(weight: PackedWeight) -> object:
    if weight.order is not None or weight.groups is not None:
        return object()  # like no other
    return weight.bits, weight.group, weight.scales.dtype, weight.zeros is None


def _cat(a: PackedWeight, b: PackedWeight) -> PackedWeight:
    return PackedWeight(
        bits=a.bits,
        in_features=a.in_features,
        group=a.group,
        codes=torch.cat((a.codes, b.codes)),
        scales=torch.cat((a.scales, b.scales)),
        zeros=None if a.zeros is None or b.zeros is None else torch.cat((a.zeros, b.zeros)),
    )
