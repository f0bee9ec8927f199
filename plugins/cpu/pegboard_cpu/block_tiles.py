"""Register tiles over weights that stay in GGUF blocks: products of bytes, summed exactly in int32 within a block.

A tile has `LANES` output features, one a lane, so that nothing is ever summed across lanes. Its weights are one record
a block of 32 inputs, one behind the other: the features' scales (float16), their minima (Q4_1), then the numbers: each
lane has four inputs that follow each other. With four bits, the low halves are inputs 0 .. 15, the high ones 16 .. 31.

Rows of x are prepared once: I bytes with sign, then one number a block each of their scale (float32), and of their sum:
times the scale for Q4_1 (float32), else times what is subtracted from every weight (int32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .tiles import Loop, tile_function
from .vectors import WIDTH, features, intrinsic, prefetch

#: Inputs of a block.
BLOCK: Final = 32
#: Output features of a tile.
LANES: Final = WIDTH
#: Rows of the widest tile.
ROWS: Final = 4
#: Whether the CPU adds four products of bytes to an int32 at once (VNNI); else pairs are added in 16 bits.
FOURFOLD: Final = LANES == 16 and features.get("avx512vnni", False)
#: Why this CPU can't, or "".
REFUSAL: Final = (
    ""
    if (LANES == 8 or (LANES == 16 and features.get("avx512bw")))
    else "multiplies bytes with AVX2 or AVX-512BW, which this CPU lacks"
)
#: Bytes ahead at which weights are fetched.
_AHEAD: Final = 2048
#: Bytes of a vector.
_BYTES: Final = 4 * LANES

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS, _HALVES = ir.VectorType(_F32, LANES), ir.VectorType(ir.HalfType(), LANES)
_INTS, _WORDS, _CHARS = (
    ir.VectorType(kind, count) for kind, count in ((_I32, LANES), (_I16, 2 * LANES), (_I8, 4 * LANES))
)


class Kind(msgspec.Struct, frozen=True):
    """A block type that is served as it is."""

    name: str
    #: Bits of a number.
    bits: int
    #: Whether a block has a minimum beside its scale.
    minimum: bool
    #: What is subtracted from the numbers as this CPU reads them, which are unsigned.
    zero: int
    #: Whether the numbers, unlike these, have a sign.
    signed: bool = False

    @property
    def block_bytes(self) -> int:
        return (4 if self.minimum else 2) + BLOCK * self.bits // 8


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("Q4_0", bits=4, minimum=False, zero=8),
        Kind("Q4_1", bits=4, minimum=True, zero=0),
        Kind("Q8_0", bits=8, minimum=False, zero=128 if FOURFOLD else 0, signed=not FOURFOLD),
    )
}


def _place(builder: Any, address: Any, shift: int) -> Any:
    return builder.add(address, ir.Constant(_I64, shift)) if shift else address


def _load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _all(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * kind.count)


def _spread(builder: Any, number: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


class _Sums:
    """What products of four bytes a lane are added to, for each row of a tile."""

    def __init__(self, builder: Any, kind: Kind, starts: list[Any]) -> None:
        self._builder, self._kind = builder, kind
        self._sums = starts if FOURFOLD else [None] * len(starts)
        self._starts = starts

    def add(self, row: int, weights: Any, x: Any) -> None:
        """weights [4 LANES] bytes; x: four bytes with sign as one int32."""
        builder = self._builder
        spread = _spread(builder, x, _INTS)
        if FOURFOLD:
            arguments = [self._sums[row], builder.bitcast(weights, _INTS), spread]
            self._sums[row] = _call(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, arguments)
            return
        factors = builder.bitcast(spread, _CHARS)
        if self._kind.signed:
            negative = builder.icmp_signed("<", weights, _all(_CHARS, 0))
            factors = builder.select(negative, builder.neg(factors), factors)
            weights = builder.select(negative, builder.neg(weights), weights)
        pairs = "llvm.x86.avx2.pmadd.ub.sw" if LANES == 8 else "llvm.x86.avx512.pmaddubs.w.512"
        words = _call(builder, pairs, _WORDS, [weights, factors])
        before = self._sums[row]
        if self._kind.bits == 4:  # eight times 2 * 15 * 127 fit into 16 bits
            self._sums[row] = words if before is None else builder.add(before, words)
        else:
            wide = self._widen(words)
            self._sums[row] = wide if before is None else builder.add(before, wide)

    def _widen(self, words: Any) -> Any:
        pairs = "llvm.x86.avx2.pmadd.wd" if LANES == 8 else "llvm.x86.avx512.pmaddw.d.512"
        return _call(self._builder, pairs, _INTS, [words, _all(_WORDS, 1)])

    def total(self, row: int) -> Any:
        """[LANES] int32"""
        if FOURFOLD:
            return self._sums[row]
        total = self._widen(self._sums[row]) if self._kind.bits == 4 else self._sums[row]
        return self._builder.add(total, self._starts[row]) if self._kind.zero else total


def block_tile(kind: Kind, rows: int) -> Callable[..., None]:
    """tile(x, x_step, w, _, blocks, out, out_step): out[r, :LANES] = x[r] W^T for one tile's records at w.

    All are addresses and steps in bytes; x as prepared; `blocks`, above 0, of a row."""
    record = LANES * kind.block_bytes
    numbers = LANES * (4 if kind.minimum else 2)

    def body(builder: Any, x: Any, x_step: Any, w: Any, _: Any, blocks: Any, out: Any, out_step: Any) -> None:
        x_rows = [builder.add(x, builder.mul(x_step, ir.Constant(_I64, row))) for row in range(rows)]
        scales = builder.mul(blocks, ir.Constant(_I64, BLOCK))
        sums_at = builder.mul(blocks, ir.Constant(_I64, BLOCK + 4))
        loop = Loop(builder, blocks, 1, [_all(_FLOATS, 0.0)] * rows)
        block = builder.add(w, builder.mul(loop.index, ir.Constant(_I64, record)))
        mine = [builder.add(place, builder.mul(loop.index, ir.Constant(_I64, BLOCK))) for place in x_rows]
        offset = builder.mul(loop.index, ir.Constant(_I64, 4))
        for line in range(0, record, 64):
            prefetch(builder, _place(builder, block, _AHEAD + line))

        def of_block(row: int, table: Any, number: Any) -> Any:
            place = builder.add(builder.add(x_rows[row], table), offset)
            return _spread(builder, _load(builder, place, number.element, 4), number)

        starts = [of_block(row, sums_at, _INTS) if kind.zero else _all(_INTS, 0) for row in range(rows)]
        sums = _Sums(builder, kind, starts)
        for chunk in range(BLOCK * kind.bits // 32):
            weights = _load(builder, _place(builder, block, numbers + chunk * _BYTES), _CHARS)
            if kind.bits == 8:
                parts = [(chunk, weights)]
            else:
                # Shifted as words: there is no shift of bytes
                high = builder.bitcast(builder.lshr(builder.bitcast(weights, _WORDS), _all(_WORDS, 4)), _CHARS)
                low_half = _all(_CHARS, 15)
                parts = [(chunk, builder.and_(weights, low_half)), (4 + chunk, builder.and_(high, low_half))]
            for quad, part in parts:
                for row in range(rows):
                    sums.add(row, part, _load(builder, _place(builder, mine[row], 4 * quad), _I32))
        scale = builder.fpext(_load(builder, block, _HALVES), _FLOATS)
        totals = list(loop.carried)
        fma = f"llvm.fma.v{LANES}f32"
        for row in range(rows):
            factor = builder.fmul(scale, of_block(row, scales, _FLOATS))
            number = builder.sitofp(sums.total(row), _FLOATS)
            totals[row] = _call(builder, fma, _FLOATS, [number, factor, totals[row]])
        if kind.minimum:
            minimum = builder.fpext(_load(builder, _place(builder, block, 2 * LANES), _HALVES), _FLOATS)
            for row in range(rows):
                totals[row] = _call(builder, fma, _FLOATS, [minimum, of_block(row, sums_at, _FLOATS), totals[row]])
        loop.close(totals)
        for row, value in enumerate(totals):
            place = builder.add(out, builder.mul(out_step, ir.Constant(_I64, row)))
            builder.store(value, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)

    return tile_function(f"pegboard_blocks_{kind.name}_{rows}", body)


#: x that are smaller than this are zero: 127 divided by less would not be a float32.
_SMALLEST: Final = 1e-30


@intrinsic
def round_block(_: Any, x: Any, out: Any, scale: Any, total: Any, zero: Any) -> Any:
    """One block of 32 float32 numbers at x -> bytes at `out`, the float32 at `scale`, and at `total` their sum: times
    -zero as an int32, or with zero = 0 times the scale as a float32. NaN and infinities make the scale NaN or infinite,
    and with it all that comes of the block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, out, scale, total, zero = arguments
        parts = [_load(builder, _place(builder, x, at), _FLOATS, 4) for at in range(0, 4 * BLOCK, 4 * LANES)]
        peak = None
        for part in parts:
            # As whole numbers, the bits of NaN are above those of infinity, and these above all others
            size = builder.and_(builder.bitcast(part, _INTS), _all(_INTS, 0x7FFFFFFF))
            peak = size if peak is None else _call(builder, f"llvm.smax.v{LANES}i32", _INTS, [peak, size])
        peak = builder.bitcast(_call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", _I32, [peak]), _F32)
        step = builder.fdiv(peak, ir.Constant(_F32, 127.0))
        some = builder.fcmp_ordered(">", peak, ir.Constant(_F32, _SMALLEST))
        inverse = builder.select(some, builder.fdiv(ir.Constant(_F32, 127.0), peak), ir.Constant(_F32, 0.0))
        inverse = _spread(builder, inverse, _FLOATS)
        chars, whole = ir.VectorType(_I8, LANES), None
        for number, part in enumerate(parts):
            steps = _call(builder, f"llvm.rint.v{LANES}f32", _FLOATS, [builder.fmul(part, inverse)])
            steps = builder.fptosi(steps, _INTS)
            place = builder.inttoptr(_place(builder, out, number * LANES), chars.as_pointer())
            builder.store(builder.trunc(steps, chars), place, align=1)
            whole = steps if whole is None else builder.add(whole, steps)
        whole = _call(builder, f"llvm.vector.reduce.add.v{LANES}i32", _I32, [whole])
        scaled = builder.bitcast(builder.fmul(builder.sitofp(whole, _F32), step), _I32)
        shifted = builder.mul(whole, builder.neg(builder.trunc(zero, _I32)))
        plain = builder.icmp_signed("==", zero, ir.Constant(_I64, 0))
        builder.store(step, builder.inttoptr(scale, _F32.as_pointer()), align=4)
        builder.store(builder.select(plain, scaled, shifted), builder.inttoptr(total, _I32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
