"""What `pegboard tune` measures of the INT4 products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.checkpoint import TensorInfo
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import KernelTuner, LinearSpec, QuantizerNeed, Shard, TunedProduct
from pegboard.devices import torch_device
from pegboard.errors import ConfigError

from ..packed.rounding import round_to_nearest
from ..packed.weight import dense
from .cuts import AnyCut
from .launching import Int4Launcher
from .layout import TILE, TiledWeight, tile
from .legal import Place, candidates
from .tables import Entry, Table

#: (outputs, inputs, columns a group) of the weights that the kernels multiply in a linear.
Shapes = Callable[[LinearSpec, Mapping[str, TensorInfo], Shard], Sequence[tuple[int, int, int]]]
#: Rows that are worth a measurement: an entry of a table serves down to the next.
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Bytes of copies of a weight: several times the L2 of the devices that there are; and copies at most, with which those
#: of small weights may stay in it.
_COLD_BYTES: Final = 200_000_000
_MOST_COPIES: Final = 128
#: Distance from the product with the weight as it is dequantised, relative to that. Rounding takes 3e-3.
_ERROR: Final = 2e-2


class Int4Tuner(KernelTuner):
    """Random weights of the linears' shapes, with zero points, in bfloat16 scales; x is of the need's dtype."""

    def __init__(
        self,
        need: QuantizerNeed,
        shapes: Shapes,
        launcher: Int4Launcher,
        processors: int,
        cold_bytes: int = _COLD_BYTES,
    ) -> None:
        self._dtype = getattr(torch, need.dtype)
        self._facts: DeviceFacts = need.device
        self._shapes, self._launcher, self._processors = shapes, launcher, processors
        self._cold_bytes = cold_bytes
        #: What the names of products and ways mean.
        self._known: dict[str, tuple[Place, dict[str, AnyCut]]] = {}

    def products(
        self,
        linears: Sequence[LinearSpec],
        stored: Mapping[str, TensorInfo],
        shard: Shard,
        rows: Sequence[int] | None,
    ) -> Iterator[TunedProduct]:
        found = {
            (outputs, inputs, min(group, TILE))
            for spec in linears
            for outputs, inputs, group in self._shapes(spec, stored, shard)
        }
        for outputs, inputs, group in sorted(found):
            uncut = [n for n in rows or () if self._launcher.cut_of(n, outputs, inputs, group) is None]
            if uncut:
                raise ConfigError(
                    f"products of {uncut[0]} rows have no cut with groups of {group}: the weight is dequantised and "
                    "torch multiplies; leave such rows out"
                )
        for outputs, inputs, group in sorted(found):
            worth = [n for n in _ROWS if self._launcher.cut_of(n, outputs, inputs, group) is not None]
            yield from self._of_shape((outputs, inputs, group), rows or worth)

    def table(self, chosen: Mapping[str, tuple[str, float]]) -> Mapping[str, Any]:
        entries = []
        for name, (way, microseconds) in chosen.items():
            place, ways = self._known[name]
            fields = msgspec.structs.asdict(place)
            entries.append(Entry(**fields, cut=ways[way], microseconds=round(microseconds, 3)))
        capability = self._facts.capability or (0, 0)
        made = Table(device=self._facts.name, capability=capability, cuts=tuple(entries))
        plain: dict[str, Any] = msgspec.to_builtins(made)
        return plain

    def _of_shape(self, shape: tuple[int, int, int], all_rows: Sequence[int]) -> Iterator[TunedProduct]:
        outputs, inputs, group = shape
        device = torch_device(self._facts)
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.randn(outputs, inputs, device=device, dtype=self._dtype, generator=generator) * 0.02
        packed = round_to_nearest(weight, 4, group, symmetric=False)
        exact = dense(packed, torch.float32)
        tiled, count = tile(packed), max(2, min(_MOST_COPIES, -(-self._cold_bytes // packed.nbytes)))
        copies = [
            replace(tiled, words=tiled.words.clone(), steps=tiled.steps.clone(), counters=tiled.counters.clone())
            for _ in range(count)
        ]
        for rows in all_rows:
            x = torch.randn(rows, inputs, device=device, dtype=self._dtype, generator=generator)
            out = torch.empty(rows, outputs, device=device, dtype=self._dtype)
            place = Place(outputs=outputs, inputs=inputs, group=group, rows=rows)
            yield self._product(place, x, copies, x.float() @ exact.T, out)

    def _product(
        self, place: Place, x: Tensor, copies: Sequence[TiledWeight], right: Tensor, out: Tensor
    ) -> TunedProduct:
        before = self._launcher.cut_of(place.rows, place.outputs, place.inputs, place.group)
        capability = self._facts.capability or (0, 0)
        cuts = dict.fromkeys(candidates(place, capability, self._processors))
        ways = {_name(cut): cut for cut in (before, *cuts) if cut is not None}
        name = f"{place.outputs} x {place.inputs}, groups of {place.group}, {place.rows} rows"
        self._known[name] = place, ways

        def calls(cut: AnyCut) -> list[Callable[[], object]]:
            return [partial(self._launcher.multiply_as, x, weight, None, out, cut) for weight in copies]

        def is_right() -> bool:
            error = float((out.float() - right).norm() / right.norm())
            out.fill_(torch.nan)  # whoever writes nothing is wrong
            return error <= _ERROR

        return TunedProduct(name=name, ways={way: calls(cut) for way, cut in ways.items()}, is_right=is_right)


def _name(cut: AnyCut) -> str:
    fields = [f"{field}={value}" for field, value in msgspec.structs.asdict(cut).items()]
    return f"{type(cut).__name__}({', '.join(fields)})"
