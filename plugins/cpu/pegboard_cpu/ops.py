"""The ops on a CPU in float32, compiled for it: what torch does in several passes and calls is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor

from pegboard.contracts.attention import LayerCache
from pegboard.contracts.ops import Activation, Norm, OpsNeed, Rope
from pegboard.contracts.quantizer import Linear
from pegboard.ops import TorchOps

from . import team
from .blocks import BlocksLinear

#: Rows up to which a product reads its weight once; with more, the linear's own product computes faster.
FEW_ROWS: Final = 16
#: Numbers that a thread should have to read before it is worth waking.
_ENOUGH: Final = 1 << 14


class NumbaOps(TorchOps):
    """`project` is one kernel for up to FEW_ROWS rows over linears that show a float32 weight whose sizes suit the
    vectors; other linears are called. Inputs whose numbers do not lie side by side go torch's way."""

    def __init__(self, batch_invariant: bool) -> None:
        from . import project_kernel, rope_kernel, row_kernels
        from .functions import ACTIVATIONS
        from .tiles import FEATURES
        from .vectors import WIDTH

        self._activations, self._width, self._features = ACTIVATIONS, WIDTH, FEATURES
        self._project = team.Kernel(project_kernel.project, project_kernel.LAYOUT)
        self._norm = team.Kernel(row_kernels.norm, row_kernels.NORM_LAYOUT)
        self._gated = team.Kernel(row_kernels.gated, row_kernels.GATED_LAYOUT)
        self._rope_write = team.Kernel(rope_kernel.rope_write, rope_kernel.LAYOUT)
        self._batch_invariant = batch_invariant
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    @classmethod
    def refusals(cls, need: OpsNeed, options: Any) -> Sequence[str]:
        reasons = list(super().refusals(need, options))
        if need.device.type != "cpu":
            reasons.append(f"runs on the CPU, not on {need.device.type}")
        if need.dtype != "float32":
            reasons.append(f"computes in float32, not in {need.dtype}")
        return reasons + team.refusals()

    @classmethod
    def create(cls, need: OpsNeed, options: Any) -> Self:
        return cls(need.batch_invariant)

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        size = x.shape[-1]
        rows = _rows(x)
        others = rows if residual is None or rows is None else _rows(residual)
        if rows is None or others is None or not _plain(norm.weight):
            return super().norm(x, norm, residual)
        out = x.new_empty(x.shape)
        count = rows.shape[0]
        self._norm(
            _threads(count * size),
            count,
            size,
            rows.data_ptr(),
            4 * rows.stride(0),
            norm.weight.data_ptr(),
            0 if residual is None else others.data_ptr(),
            4 * others.stride(0),
            out.data_ptr(),
            norm.eps,
            norm.offset,
        )
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        rows = _rows(x)
        if rows is None:
            return super().gated(x, activation)
        count, size = rows.shape[0], x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        self._gated(
            _threads(4 * count * size),
            count,
            size,
            rows.data_ptr(),
            4 * rows.stride(0),
            self._activations[activation],
            out.data_ptr(),
        )
        return out

    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if (
            isinstance(linear, BlocksLinear)
            and linear.fuses(activation)
            and (norm is None or _plain(norm.weight))
            and (_by_row(x) and (residual is None or _by_row(residual)))
        ):
            return linear.project(x, norm, activation, residual)
        rows, size = x.shape
        weight, bias = linear.weight, linear.bias
        if weight is not None and self._batch_invariant and rows > FEW_ROWS:
            runs = [slice(first, first + FEW_ROWS) for first in range(0, rows, FEW_ROWS)]
            others = [None if residual is None else residual[run] for run in runs]
            return torch.cat(
                [
                    self.project(x[run], linear, norm=norm, activation=activation, residual=other)
                    for run, other in zip(runs, others, strict=True)
                ]
            )
        features = linear.out_features if activation is None else linear.out_features // 2
        if (
            weight is None
            or not 0 < rows <= FEW_ROWS
            or linear.partition == "input"
            or size % self._width
            or features < self._features
            or not (_plain(weight) and (bias is None or _plain(bias)) and (norm is None or _plain(norm.weight)))
            or not (_by_row(x) and (residual is None or _by_row(residual)))
        ):
            return super().project(x, linear, norm=norm, activation=activation, residual=residual)
        out = x.new_empty(rows, features)
        threads = _threads(weight.numel())
        normed = 0 if norm is None else threads * rows * size
        scratch = self._room(normed + (0 if activation is None else 2 * rows * features))
        self._project(
            threads,
            rows,
            size,
            features,
            x.data_ptr(),
            4 * x.stride(0),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if activation is None else self._activations[activation],
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else 4 * residual.stride(0),
            0 if norm is None else norm.weight.data_ptr(),
            scratch,
            scratch + 4 * normed,
            out.data_ptr(),
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
        )
        return out

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
        query_heads, kv_heads, size = heads
        tokens, width = qkv.shape
        entries = cache.tensors["k"], cache.tensors["v"]
        tables = () if rope is None else (rope.cos, rope.sin)
        weights = tuple(norm.weight for norm in (q_norm, k_norm) if norm is not None)
        if (
            width != (query_heads + 2 * kv_heads) * size
            or not _by_row(qkv)
            or not all(map(_plain, (*entries, *tables, *weights)))
            or not all(index.dtype is torch.int64 and index.is_contiguous() for index in (positions, write_index))
        ):
            return super().rope_write(qkv, heads, positions, rope, cache, write_index, q_norm, k_norm)
        q, k = qkv.new_empty(tokens, query_heads, size), qkv.new_empty(tokens, kv_heads, size)
        self._rope_write(
            _threads(tokens * width),
            tokens,
            query_heads,
            kv_heads,
            size,
            qkv.data_ptr(),
            4 * qkv.stride(0),
            positions.data_ptr(),
            write_index.data_ptr(),
            0 if rope is None else rope.cos.data_ptr(),
            0 if rope is None else rope.sin.data_ptr(),
            0 if rope is None else rope.cos.shape[1],
            rope is not None and rope.interleaved,
            q.data_ptr(),
            k.data_ptr(),
            entries[0].data_ptr(),
            entries[1].data_ptr(),
            0 if q_norm is None else q_norm.weight.data_ptr(),
            0 if k_norm is None else k_norm.weight.data_ptr(),
            0.0 if q_norm is None else q_norm.eps,
            0.0 if q_norm is None else q_norm.offset,
            0.0 if k_norm is None else k_norm.eps,
            0.0 if k_norm is None else k_norm.offset,
        )
        return q, k, qkv.view(tokens, -1, size)[:, query_heads + kv_heads :]

    def _room(self, numbers: int) -> int:
        """The address of scratch: a part has one caller at a time."""
        if self._scratch.numel() < numbers:
            self._scratch = torch.empty(numbers, dtype=torch.float32, device="cpu")
        return self._scratch.data_ptr()


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous()


def _by_row(x: Tensor) -> bool:
    """Whether x [T, E] has rows of float32 numbers that lie side by side."""
    return x.dtype is torch.float32 and x.stride(1) == 1


def _rows(x: Tensor) -> Tensor | None:
    """x [..., E] as such rows, a view; None: it is not made of them."""
    if x.dim() == 2:
        return x if _by_row(x) else None
    return x.view(-1, x.shape[-1]) if _plain(x) else None


def _threads(numbers: int) -> int:
    """How many threads to read so many numbers with."""
    return max(1, min(torch.get_num_threads(), numbers // _ENOUGH))
