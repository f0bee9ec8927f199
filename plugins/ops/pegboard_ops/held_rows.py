"""The kernel of `projecting_held`: products of up to 64 rows whose weights a program holds in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gating import activate

#: Inputs that a warp's instructions take at a time: eight numbers, 16 bytes, a thread, twice.
CHUNK = gl.constexpr(64)


@gluon.jit
def place(lane, program, features, PAIRED: gl.constexpr, MADE: gl.constexpr):
    """Which row of the weight a program's lane is: outputs in order, or a gate and its up by turns."""
    if PAIRED:
        row = gl.minimum(program * MADE + lane // 2, features - 1) + lane % 2 * features
    else:
        row = gl.minimum(program * MADE + lane, features - 1)
    return row


@gluon.jit
def project_held(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    features,
    eps,
    offset,
    INPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    AHEAD: gl.constexpr,
    NORM: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A program makes BLOCK_N outputs [W, N, M] of W warps, which split the inputs and are added at the end.

    Weights go from memory to the registers in which the tensor cores want them, x likewise: a thread's eight
    neighbours are eight inputs of the product's order, the same for both. All weights are asked for before the wait for
    x. 1 / rms multiplies the sums, whose squares are gathered beside them.

    With ACTIVATION half of the block's rows are gates and half the matching ups; `features` counts outputs. AHEAD:
    chunks of x that are asked for at once."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    PAIRED: gl.constexpr = ACTIVATION is not None
    TURN: gl.constexpr = 2 if PAIRED else 1
    MADE: gl.constexpr = BLOCK_N // TURN
    # A thread adds what the warps found; it has both of a pair
    WHOLE: gl.constexpr = gl.BlockedLayout(
        [num_warps, TURN, 1], [1, 16 // TURN, 2 * TURN], [1, 1, num_warps], [1, 2, 0]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, num_warps], [0, 1]) if PAIRED else gl.SliceLayout(0, WHOLE)
    VECTOR: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps, 1], [1, 0])
    CHUNKS: gl.constexpr = INPUTS // (num_warps * CHUNK)
    program = gl.program_id(0)
    if PDL:
        gdc_launch_dependents()

    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    warp = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    row = place(lane, program, features, PAIRED, MADE).to(gl.int64)
    at = row[None, :, None] * INPUTS + (warp[:, None, None] * CHUNK + k[None, None, :])
    weights = ()
    for c in gl.static_range(CHUNKS):
        part = gl.load(weight_ptr + at + c * num_warps * CHUNK, eviction_policy="evict_first")
        weights = weights + (part,)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        gains = gl.allocate_shared_memory(
            gl.float32, [CHUNKS, num_warps, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        g_warp, g_k = gl.arange(0, num_warps, gl.SliceLayout(1, VECTOR)), gl.arange(0, CHUNK, gl.SliceLayout(0, VECTOR))
        norms = ()
        for c in gl.static_range(CHUNKS):
            gain = gl.load(norm_ptr + c * num_warps * CHUNK + g_warp[:, None] * CHUNK + g_k[None, :])
            norms = norms + (gain,)  # type: ignore[assignment]  # noqa: RUF005
    if BIAS:
        y_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, WHOLE)))
        bias = gl.load(bias_ptr + place(y_n, program, features, PAIRED, MADE)).to(gl.float32)
    if PDL:
        gdc_wait()

    out = program * MADE + gl.arange(0, MADE, gl.SliceLayout(1, OUT))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    there = (out < features)[:, None] & (m < rows)[None, :]
    to = m[None, :] * features + out[:, None]
    x_warp = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    x_k = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    # Rows beyond the last are copies of it and go nowhere
    x_m = gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))), rows - 1)
    x_at = x_m[None, None, :] * INPUTS + (x_warp[:, None, None] * CHUNK + x_k[None, :, None])
    even = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    odd = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    squares = gl.zeros([num_warps, BLOCK_M], gl.float32, gl.SliceLayout(1, RIGHT))
    for start in gl.static_range(0, CHUNKS, AHEAD):
        xs = ()
        for c in gl.static_range(AHEAD):
            if start + c < CHUNKS:
                xs = xs + (gl.load(x_ptr + x_at + (start + c) * num_warps * CHUNK),)  # type: ignore[assignment]  # noqa: RUF005
        if RESIDUAL and start == 0:
            residual = gl.load(residual_ptr + to, mask=there, other=0.0)
        if NORM and start == 0:
            for c in gl.static_range(CHUNKS):
                gains.index(c).store(norms[c].to(gl.float32) + offset)
        for c in gl.static_range(AHEAD):
            if start + c < CHUNKS:
                x = xs[c]  # type: ignore[var-annotated]
                if NORM:
                    gain = gains.index(start + c).load(gl.SliceLayout(2, RIGHT))
                    wide = x.to(gl.float32)  # type: ignore[var-annotated]
                    squares += gl.sum(wide * wide, 1)
                    x = (wide * gain[:, :, None]).to(x.dtype)
                # Two chains where one would be short of instructions that don't wait for each other
                if BLOCK_M <= 16 and (start + c) % 2:
                    odd = mma_v2(weights[start + c], x, odd)
                else:
                    even = mma_v2(weights[start + c], x, even)
    y = gl.sum(gl.convert_layout(even + odd, WHOLE), 0)
    if NORM:
        square = gl.sum(gl.convert_layout(squares, gl.SliceLayout(1, WHOLE)), 0)
        scale = gl.rsqrt(square / INPUTS + eps)
        y *= gl.convert_layout(scale, gl.SliceLayout(0, gl.SliceLayout(0, WHOLE)))[None, :]
    if BIAS:
        y += bias[:, None]
    if PAIRED:
        gate, up = gl.split(gl.permute(gl.reshape(y, [MADE, 2, BLOCK_M]), (0, 2, 1)))
        y = gl.convert_layout(activate(gate, ACTIVATION) * up, OUT)
    if RESIDUAL:
        y += residual.to(gl.float32)
    gl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=there)
