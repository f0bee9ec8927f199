"""The ops of CUDA devices: fused Triton kernels where they are faster than torch's, else torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

from torch import Tensor

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.ops import Activation, Located, Norm, OpsNeed, Rope, SlotTables
from pegboard.contracts.quantizer import AddingLinear, Linear
from pegboard.ops import TorchOps, as_indexable, check_width

from .embedding import launch_embed
from .gating import launch_gated
from .launching import Launcher
from .locating import launch_locate
from .norms import launch_norm
from .projecting import added, launch_row, row_shape
from .projecting_held import can_norm, held_shape, launch_held
from .projecting_rows import MOST_ROWS, launch_few, splits_for
from .rope_writing import can_write, launch_rope_write

_DTYPES = ("float16", "bfloat16", "float32")
#: Beyond, torch's gather is as fast.
_FEW_IDS = 1024
#: A norm holds whole rows in registers.
_MOST_HIDDEN = 16384


class TritonOps(TorchOps):
    """Every op of `TorchOps` in one launch each; a lone row's projection is one launch with its norm, activation and
    residual, and so are those of up to 64 rows over few inputs. `rope_write` keeps neither k nor v: the cache holds
    them.

    In batch-invariant mode all projections go the way of many rows."""

    capturable = True

    def __init__(self, need: OpsNeed, *, interpreted: bool = False) -> None:
        self._launcher = Launcher(need.device, interpreted=interpreted)
        self._hopper = interpreted or (need.device.capability or (0, 0)) >= (9, 0)
        self._fuses = need.dtype != "float32" and not need.batch_invariant

    @classmethod
    def refusals(cls, need: OpsNeed, options: Any) -> Sequence[str]:
        reasons = list(super().refusals(need, options))
        if need.device.type != "cuda" or (need.device.capability or (0, 0)) < (8, 0):
            found = need.device.type if need.device.capability is None else f"capability {need.device.capability}"
            reasons.append(f"needs a CUDA device of compute capability 8.0 or more, not {found}")
        if need.dtype not in _DTYPES:
            reasons.append(f"its kernels compute in {', '.join(_DTYPES)}, not in {need.dtype}")
        if need.hidden_size > _MOST_HIDDEN:
            reasons.append(f"its norms hold rows of at most {_MOST_HIDDEN} numbers, not {need.hidden_size}")
        return reasons

    @classmethod
    def create(cls, need: OpsNeed, options: Any) -> Self:
        return cls(need)

    def writes(self, layout: KVLayout) -> bool:
        return can_write(layout)

    def locate(self, slots: Tensor, advance: Tensor, tables: SlotTables, width: int) -> Located:
        return launch_locate(slots, advance, tables, width, self._launcher)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        few = 0 < ids.shape[0] <= _FEW_IDS
        return launch_embed(ids, weight, self._launcher) if few else super().embed(ids, weight)

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        if x.shape[-1] > _MOST_HIDDEN or x.stride(-1) != 1 or not x.numel():
            return super().norm(x, norm, residual)
        return launch_norm(x, norm, residual, self._launcher)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        return launch_gated(x, activation, self._launcher) if x.numel() else super().gated(x, activation)

    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        weight, rows, paired = self._fusible(x, linear), x.shape[0], activation is not None
        if weight is not None and rows == 1:
            shape = row_shape(weight.shape[0], weight.shape[1], paired)
            if shape is not None:
                return launch_row(x, weight, linear.bias, norm, activation, residual, shape, self._launcher)
        held = None
        if weight is not None and rows > 1 and not self._launcher.interpreted:
            held = held_shape(rows, weight.shape[0], weight.shape[1])
        if norm is not None and (held is None or not can_norm(x, norm)):
            x, norm = self.norm(x, norm), None
        if weight is not None and held is not None:
            return launch_held(x, weight, linear.bias, norm, activation, residual, held, self._launcher)
        if weight is not None and 1 < rows <= MOST_ROWS and self._hopper:
            splits = splits_for(weight.shape[0], weight.shape[1], paired)
            if splits is not None:
                return launch_few(x, weight, linear.bias, activation, residual, splits, self._launcher)
        if weight is not None and residual is not None and activation is None and linear.bias is None:
            return added(x, weight, residual)
        if residual is not None and activation is None and hasattr(linear, "add_to"):
            return cast("AddingLinear", linear).add_to(x, residual)
        out = linear(x)
        if activation is not None:
            out = self.gated(out, activation)
        return out if residual is None else residual + out

    def _fusible(self, x: Tensor, linear: Linear) -> Tensor | None:
        """The weight, when kernels may take the linear's place: not for a part of a sum over ranks."""
        weight = linear.weight
        if not self._fuses or weight is None or linear.partition == "input":
            return None
        return weight if weight.dtype == x.dtype and weight.is_contiguous() and x.is_contiguous() else None

    def rope_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        positions: Tensor,
        rope: Rope | None,
        cache: LayerCache,
        write_index: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        check_width(qkv, heads)
        q = launch_rope_write(qkv, heads, positions, rope, cache, write_index, q_norm, k_norm, self._launcher)
        return q, None, None

    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        if cache.layout.name == "nhd":
            super().move_entries(cache, source, target)
            return
        size = cache.page_size
        read, written = (source // size, source % size), (target // size, target % size)
        for name, tensor in cache.tensors.items():
            tensor = as_indexable(tensor)
            held = tensor.transpose(2, 3) if name == "v" else tensor  # [pages, K, S, ...]
            held[written[0], :, written[1]] = held[read[0], :, read[1]]
