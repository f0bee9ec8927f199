"""The matrix product of 2 to 16 rows over many inputs: Y^T = W X^T on Hopper's tensor cores, with activation and
residual after it.

The weight is the left operand, so that its many rows fill the instruction and X's few the narrow side. Where the
outputs don't fill the device, the inputs are split too, and a second launch adds the parts in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .gating import activate

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.ops import Activation

    from .launching import Launcher

MOST_ROWS = 16
_BLOCK_N = 64
_BLOCK_K = 128
#: Programs below which the inputs are split
_FILL = 120


@triton.jit
def finish(y, out_ptr, bias_ptr, residual_ptr, n, m, rows, features, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """Adds what is to be added to y [N, M] and writes it to out [rows, features]."""
    there = (n < features)[:, None] & (m < rows)[None, :]
    at = m[None, :] * features + n[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < features, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def project_few(
    x_desc,
    weight_desc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    rows,
    features,
    steps,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of outputs, splits of the inputs, `steps` blocks of them each). With ACTIVATION the weight is
    [2, F, I] and a block takes BLOCK_N / 2 gates and the matching ups. SPLIT: parts [splits, rows, features]."""
    program, split = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K
        if ACTIVATION is None:
            weight = weight_desc.load([program * BLOCK_N, k])
        else:
            weight = tl.reshape(weight_desc.load([0, program * (BLOCK_N // 2), k]), [BLOCK_N, BLOCK_K])
        x = x_desc.load([0, k])
        sums = tl.dot(weight, x.T, sums)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLIT:
        at = (split * rows + m)[None, :] * features + n[:, None]
        tl.store(parts_ptr + at, sums, mask=(n < features)[:, None] & (m < rows)[None, :])
    elif ACTIVATION is None:
        finish(sums, out_ptr, bias_ptr, residual_ptr, n, m, rows, features, BIAS, RESIDUAL)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, HALF, BLOCK_M]), (1, 2, 0)))
        n = program * HALF + tl.arange(0, HALF)
        if BIAS:
            gate += tl.load(bias_ptr + n, mask=n < features, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + features + n, mask=n < features, other=0.0).to(tl.float32)[:, None]
        y = activate(gate, ACTIVATION) * up
        finish(y, out_ptr, bias_ptr, residual_ptr, n, m, rows, features, False, RESIDUAL)


@triton.jit
def add_parts(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    size,
    features,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [size] = sum of parts [SPLITS, size], and what is to be added."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(parts_ptr + split * size + at, mask=there, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + at % features, mask=there, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=there)


def splits_for(outputs: int, inputs: int, paired: bool) -> int | None:
    """Into how many parts the inputs are split; None: this kernel is not made for the shape."""
    if inputs % _BLOCK_K or outputs < 1024 or (paired and outputs % 2):
        return None
    programs, steps = triton.cdiv(outputs, _BLOCK_N), inputs // _BLOCK_K
    if paired or programs >= _FILL:
        return 1
    able = [splits for splits in (1, 2, 3, 4, 6, 8) if steps % splits == 0 and steps // splits >= 4]
    return next((splits for splits in able if programs * splits >= _FILL), able[-1] if able else None)


def launch_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    splits: int,
    launcher: Launcher,
) -> Tensor:
    """x [T, I], T at most 16, weight [O, I], both dense -> residual + act(x W^T + bias), [T, O] or [T, O / 2].

    Reference: `pegboard.ops.TorchOps.project`. Nothing is rounded before the result: within one unit in the last place
    of x's dtype, and of float32 sums over I. Bytes: the weight once."""
    import torch  # not for those who compile the kernel

    rows, inputs = x.shape
    outputs = weight.shape[0]
    features = outputs if activation is None else outputs // 2
    out = x.new_empty(rows, features)
    x_desc = TensorDescriptor(x, [rows, inputs], [inputs, 1], [MOST_ROWS, _BLOCK_K])
    if activation is None:
        weight_desc = TensorDescriptor(weight, [outputs, inputs], [inputs, 1], [_BLOCK_N, _BLOCK_K])
        made = _BLOCK_N
    else:
        shape, strides = [2, features, inputs], [features * inputs, inputs, 1]
        weight_desc = TensorDescriptor(weight, shape, strides, [2, _BLOCK_N // 2, _BLOCK_K])
        made = _BLOCK_N // 2
    parts = x.new_empty(splits, rows, features, dtype=torch.float32) if splits > 1 else None
    project_few[(triton.cdiv(features, made), splits)](
        x_desc,
        weight_desc,
        bias,
        residual,
        out,
        parts,
        rows,
        features,
        inputs // _BLOCK_K // splits,
        BLOCK_N=_BLOCK_N,
        BLOCK_M=MOST_ROWS,
        BLOCK_K=_BLOCK_K,
        ACTIVATION=activation,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SPLIT=splits > 1,
        PDL=launcher.pdl,
        num_warps=4,
        num_stages=5,
        **launcher.options,
    )
    if parts is not None:
        add_parts[(triton.cdiv(rows * features, 1024),)](
            parts,
            bias,
            residual,
            out,
            rows * features,
            features,
            SPLITS=splits,
            BLOCK=1024,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            PDL=launcher.pdl,
            num_warps=4,
            **launcher.options,
        )
    return out
