"""Rows of x as bytes with a scale for each 32 numbers: what `block_tiles` multiplies."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types

from .block_kinds import BLOCK, LANES
from .block_vectors import F32, FLOATS, I8, I32, I64, INTS, call, every, load, plus, spread
from .vectors import intrinsic

#: x that are smaller than this are zero: 127 divided by less would not be a float32.
_SMALLEST: Final = 1e-30


def _rounding(sums: int) -> Any:
    """round(x, out, scale, total, zero): a block of 32 float32 numbers at x -> bytes at `out`, the float32 at `scale`,
    and at `total` their sum, or those of each half: times -zero as int32, or with zero = 0 times the scale as float32.
    NaN and infinities make the scale NaN or infinite, and with it all that comes of the block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, out, scale, total, zero = arguments
        parts = [load(builder, plus(builder, x, at), FLOATS, 4) for at in range(0, 4 * BLOCK, 4 * LANES)]
        peak = None
        for part in parts:
            # As whole numbers, the bits of NaN are above those of infinity, and these above all others
            size = builder.and_(builder.bitcast(part, INTS), every(INTS, 0x7FFFFFFF))
            peak = size if peak is None else call(builder, f"llvm.smax.v{LANES}i32", INTS, [peak, size])
        peak = builder.bitcast(call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", I32, [peak]), F32)
        step = builder.fdiv(peak, ir.Constant(F32, 127.0))
        some = builder.fcmp_ordered(">", peak, ir.Constant(F32, _SMALLEST))
        inverse = builder.select(some, builder.fdiv(ir.Constant(F32, 127.0), peak), ir.Constant(F32, 0.0))
        inverse = spread(builder, inverse, FLOATS)
        chars, whole = ir.VectorType(I8, LANES), [every(INTS, 0)] * sums
        for number, part in enumerate(parts):
            steps = call(builder, f"llvm.rint.v{LANES}f32", FLOATS, [builder.fmul(part, inverse)])
            steps = builder.fptosi(steps, INTS)
            place = builder.inttoptr(plus(builder, out, number * LANES), chars.as_pointer())
            builder.store(builder.trunc(steps, chars), place, align=1)
            mine = number * sums // len(parts)
            whole[mine] = builder.add(whole[mine], steps)
        builder.store(step, builder.inttoptr(scale, F32.as_pointer()), align=4)
        plain = builder.icmp_signed("==", zero, ir.Constant(I64, 0))
        for number, vector in enumerate(whole):
            one = call(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, [vector])
            scaled = builder.bitcast(builder.fmul(builder.sitofp(one, F32), step), I32)
            shifted = builder.mul(one, builder.neg(builder.trunc(zero, I32)))
            place = builder.inttoptr(plus(builder, total, 4 * number), I32.as_pointer())
            builder.store(builder.select(plain, scaled, shifted), place, align=4)
        return context.get_dummy_value()

    @intrinsic
    def round_block(_: Any, x: Any, out: Any, scale: Any, total: Any, zero: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return round_block


#: With one sum, and with those of the halves.
round_block, round_halves = _rounding(1), _rounding(2)
