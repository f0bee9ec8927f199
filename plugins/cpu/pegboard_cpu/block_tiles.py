"""Register tiles over weights that stay in GGUF blocks: products of bytes, summed exactly in int32 within a block.

A tile has `LANES` output features, one a lane, so that nothing is ever summed across lanes. Its weights are one record
a block of the file, one behind the other, as `block_kinds` and `block_records` say.

Rows of x are prepared once: I bytes with sign, then for each 32 inputs their scale (float32), and their sum: times the
scale where weights have a minimum (float32), else times what is subtracted from every number (int32). Where weights
have a scale for each 16 inputs, so have they a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .block_kinds import BLOCK, FOURFOLD, KINDS, LANES, Kind
from .tiles import Loop, tile_function
from .vectors import LINE, intrinsic, prefetch

#: Rows of the widest tile.
ROWS: Final = 4
#: Bytes ahead at which weights are fetched.
_AHEAD: Final = 2048
#: Bytes of a vector.
_BYTES: Final = 4 * LANES
#: Fours of inputs in a block.
_QUADS: Final = BLOCK // 4

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS, _HALVES = ir.VectorType(_F32, LANES), ir.VectorType(ir.HalfType(), LANES)
_INTS, _WORDS, _CHARS = (
    ir.VectorType(kind, count) for kind, count in ((_I32, LANES), (_I16, 2 * LANES), (_I8, 4 * LANES))
)


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


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{LANES}f32", _FLOATS, [a, b, c])


class _Sums:
    """What products of four bytes a lane are added to, for each row of a tile."""

    def __init__(self, builder: Any, kind: Kind, starts: list[Any]) -> None:
        self._builder, self._kind = builder, kind
        self._sums = list(starts)
        self._words: list[Any] = [None] * len(starts)
        #: Sums of pairs that fit into 16 bits, and how many there are.
        self._most = 1 if kind.bits == 8 else 32767 // (2 * 127 * ((1 << kind.bits) - 1))
        self._held = [0] * len(starts)

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
        self._words[row] = builder.add(self._words[row], words) if self._held[row] else words
        self._held[row] += 1
        if self._held[row] == self._most:
            self._widen(row)

    def _widen(self, row: int) -> None:
        pairs = "llvm.x86.avx2.pmadd.wd" if LANES == 8 else "llvm.x86.avx512.pmaddw.d.512"
        wide = _call(self._builder, pairs, _INTS, [self._words[row], _all(_WORDS, 1)])
        self._sums[row] = self._builder.add(self._sums[row], wide)
        self._held[row] = 0

    def total(self, row: int) -> Any:
        """[LANES] int32"""
        if self._held[row]:
            self._widen(row)
        return self._sums[row]


class _Tile:
    """One kind's loop over its records, for some rows."""

    def __init__(self, builder: Any, kind: Kind, x_rows: list[Any], blocks: Any) -> None:
        self._builder, self._kind, self._x_rows = builder, kind, x_rows
        self._scales = builder.mul(blocks, ir.Constant(_I64, BLOCK))
        self._sums = builder.mul(blocks, ir.Constant(_I64, BLOCK + 4))
        self._blocks = blocks

    def run(self, w: Any) -> list[Any]:
        """[LANES] float32 for each row."""
        builder, kind = self._builder, self._kind
        stop = builder.sdiv(self._blocks, ir.Constant(_I64, kind.blocks)) if kind.blocks > 1 else self._blocks
        records = Loop(builder, stop, 1, [_all(_FLOATS, 0.0)] * len(self._x_rows))
        record = builder.add(w, builder.mul(records.index, ir.Constant(_I64, LANES * kind.record_bytes)))
        scale = builder.fpext(_load(builder, record, _HALVES), _FLOATS)
        minimum = None
        if kind.minimum:
            minimum = builder.fpext(_load(builder, _place(builder, record, 2 * LANES), _HALVES), _FLOATS)
        first = _place(builder, record, LANES * kind.head_bytes)
        if kind.blocks == 1:
            totals = self._block(first, records.index, scale, minimum, records.carried)
            records.close(totals)
            return totals
        within = Loop(builder, ir.Constant(_I64, kind.blocks), 1, records.carried)
        block = builder.add(first, builder.mul(within.index, ir.Constant(_I64, LANES * kind.block_bytes)))
        index = builder.add(builder.mul(records.index, ir.Constant(_I64, kind.blocks)), within.index)
        totals = self._block(block, index, scale, minimum, within.carried)
        within.close(totals)
        records.close(totals)
        return totals

    def _block(self, block: Any, index: Any, scale: Any, minimum: Any, totals: list[Any]) -> list[Any]:
        """The totals with the products of 32 inputs added; `scale` and `minimum` of the record."""
        builder, kind = self._builder, self._kind
        for line in range(0, LANES * kind.block_bytes, LINE):
            prefetch(builder, _place(builder, block, _AHEAD + line))
        rows = range(len(self._x_rows))
        sums = [_Sums(builder, kind, [self._start(row, index, part) for row in rows]) for part in range(kind.sums)]
        mine = [builder.add(place, builder.mul(index, ir.Constant(_I64, BLOCK))) for place in self._x_rows]
        for quad, weights in self._quads(_place(builder, block, LANES * kind.factor_bytes)):
            for row in rows:
                x = _load(builder, _place(builder, mine[row], 4 * quad), _I32)
                sums[quad * kind.sums // _QUADS].add(row, weights, x)
        factors = [self._factor(block, number) for number in range(kind.factor_bytes)]
        if kind.factors == 1:
            # Exact: products of 11 and 6 bits
            scale, minimum = builder.fmul(scale, factors[0]), builder.fmul(minimum, factors[1])
        found = []
        for row in rows:
            numbers = [builder.sitofp(part.total(row), _FLOATS) for part in sums]
            number = numbers[0]
            if kind.factors == 2:
                number = _fma(builder, numbers[1], factors[1], builder.fmul(number, factors[0]))
            found.append(_fma(builder, number, builder.fmul(scale, self._of_row(row, index, _FLOATS)), totals[row]))
        if kind.minimum:
            found = [_fma(builder, minimum, self._of_row(row, index, _FLOATS, total=0), found[row]) for row in rows]
        return found

    def _quads(self, numbers: Any) -> Iterator[tuple[int, Any]]:
        """(which four inputs of 32, [4 LANES] bytes of them)"""
        builder, bits = self._builder, self._kind.bits
        if bits == 8:
            for quad in range(_QUADS):
                yield quad, _load(builder, _place(builder, numbers, quad * _BYTES), _CHARS)
            return
        above = [_load(builder, _place(builder, numbers, part * _BYTES), _CHARS) for part in range(bits - 4)]
        for chunk in range(_QUADS // 2):
            halves = _load(builder, _place(builder, numbers, (bits - 4 + chunk) * _BYTES), _CHARS)
            for quad, shift in ((chunk, 0), (chunk + _QUADS // 2, -4)):
                weights = self._shifted(halves, shift, 15)
                if bits > 4:
                    # Fifth (and sixth) bit of this quad: where it is, and where it must be
                    each = bits - 4
                    in_one = _QUADS // each
                    high = self._shifted(above[quad // in_one], 4 - quad % in_one * each, ((1 << each) - 1) << 4)
                    weights = builder.or_(weights, high)
                yield quad, weights

    def _shifted(self, chars: Any, left: int, mask: int) -> Any:
        """Bytes shifted to the left, or below 0 to the right, and masked. As words: there is no shift of bytes, and
        what comes from a neighbour is masked."""
        builder = self._builder
        if left:
            words, count = builder.bitcast(chars, _WORDS), _all(_WORDS, abs(left))
            words = builder.shl(words, count) if left > 0 else builder.lshr(words, count)
            chars = builder.bitcast(words, _CHARS)
        return builder.and_(chars, _all(_CHARS, mask))

    def _factor(self, block: Any, number: int) -> Any:
        """[LANES] float32 of the factor so numbered."""
        builder = self._builder
        chars = _load(builder, _place(builder, block, LANES * number), ir.VectorType(_I8, LANES))
        whole = builder.sext(chars, _INTS) if self._kind.factors == 2 else builder.zext(chars, _INTS)
        return builder.sitofp(whole, _FLOATS)

    def _start(self, row: int, index: Any, part: int) -> Any:
        return self._of_row(row, index, _INTS, total=part) if self._kind.zero else _all(_INTS, 0)

    def _of_row(self, row: int, index: Any, kind: Any, total: int | None = None) -> Any:
        """A row's scale of 32 inputs, or the sum so numbered, in all lanes."""
        builder = self._builder
        each = 1 if total is None else self._kind.sums
        table = self._scales if total is None else self._sums
        offset = builder.mul(index, ir.Constant(_I64, 4 * each))
        place = _place(builder, builder.add(builder.add(self._x_rows[row], table), offset), 4 * (total or 0))
        return _spread(builder, _load(builder, place, kind.element, 4), kind)


def block_tile(rows: int) -> Callable[..., None]:
    """tile(x, x_step, w, kind, blocks, out, out_step): out[r, :LANES] = x[r] W^T for one tile's records at w.

    All are addresses and steps in bytes; x as prepared; `kind` counts `KINDS`; `blocks`, above 0, of 32 inputs."""

    def body(builder: Any, x: Any, x_step: Any, w: Any, number: Any, blocks: Any, out: Any, out_step: Any) -> None:
        x_rows = [builder.add(x, builder.mul(x_step, ir.Constant(_I64, row))) for row in range(rows)]
        after, unknown = builder.append_basic_block("done"), builder.append_basic_block("unknown")
        choice = builder.switch(number, unknown)
        with builder.goto_block(unknown):
            builder.unreachable()
        for at, kind in enumerate(KINDS.values()):
            block = builder.append_basic_block(kind.name)
            choice.add_case(ir.Constant(_I64, at), block)
            builder.position_at_end(block)
            for row, value in enumerate(_Tile(builder, kind, x_rows, blocks).run(w)):
                place = builder.add(out, builder.mul(out_step, ir.Constant(_I64, row)))
                builder.store(value, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
            builder.branch(after)
        builder.position_at_end(after)

    return tile_function(f"pegboard_blocks_{rows}", body)


#: x that are smaller than this are zero: 127 divided by less would not be a float32.
_SMALLEST: Final = 1e-30


def _rounding(sums: int) -> Any:
    """round(x, out, scale, total, zero): a block of 32 float32 numbers at x -> bytes at `out`, the float32 at `scale`,
    and at `total` their sum, or those of each half: times -zero as int32, or with zero = 0 times the scale as float32.
    NaN and infinities make the scale NaN or infinite, and with it all that comes of the block."""

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
        chars, whole = ir.VectorType(_I8, LANES), [_all(_INTS, 0)] * sums
        for number, part in enumerate(parts):
            steps = _call(builder, f"llvm.rint.v{LANES}f32", _FLOATS, [builder.fmul(part, inverse)])
            steps = builder.fptosi(steps, _INTS)
            place = builder.inttoptr(_place(builder, out, number * LANES), chars.as_pointer())
            builder.store(builder.trunc(steps, chars), place, align=1)
            mine = number * sums // len(parts)
            whole[mine] = builder.add(whole[mine], steps)
        builder.store(step, builder.inttoptr(scale, _F32.as_pointer()), align=4)
        plain = builder.icmp_signed("==", zero, ir.Constant(_I64, 0))
        for number, vector in enumerate(whole):
            one = _call(builder, f"llvm.vector.reduce.add.v{LANES}i32", _I32, [vector])
            scaled = builder.bitcast(builder.fmul(builder.sitofp(one, _F32), step), _I32)
            shifted = builder.mul(one, builder.neg(builder.trunc(zero, _I32)))
            place = builder.inttoptr(_place(builder, total, 4 * number), _I32.as_pointer())
            builder.store(builder.select(plain, scaled, shifted), place, align=4)
        return context.get_dummy_value()

    @intrinsic
    def round_block(_: Any, x: Any, out: Any, scale: Any, total: Any, zero: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return round_block


#: With one sum, and with those of the halves.
round_block, round_halves = _rounding(1), _rounding(2)
