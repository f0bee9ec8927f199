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

from .block_kinds import BLOCK, FOURFOLD, KINDS, LANES, Kind
from .block_vectors import CHARS, FLOATS, HALVES, I8, I32, I64, INTS, WORDS, call, every, load, plus, spread
from .tiles import Loop, tile_function
from .vectors import LINE, prefetch

#: Rows of the widest tile.
ROWS: Final = 4
#: Bytes ahead at which weights are fetched.
_AHEAD: Final = 2048
#: Bytes of a vector.
_BYTES: Final = 4 * LANES
#: Fours of inputs in a block.
_QUADS: Final = BLOCK // 4


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, [a, b, c])


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
        everywhere = spread(builder, x, INTS)
        if FOURFOLD:
            arguments = [self._sums[row], builder.bitcast(weights, INTS), everywhere]
            self._sums[row] = call(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, arguments)
            return
        factors = builder.bitcast(everywhere, CHARS)
        if self._kind.signed:
            negative = builder.icmp_signed("<", weights, every(CHARS, 0))
            factors = builder.select(negative, builder.neg(factors), factors)
            weights = builder.select(negative, builder.neg(weights), weights)
        pairs = "llvm.x86.avx2.pmadd.ub.sw" if LANES == 8 else "llvm.x86.avx512.pmaddubs.w.512"
        words = call(builder, pairs, WORDS, [weights, factors])
        self._words[row] = builder.add(self._words[row], words) if self._held[row] else words
        self._held[row] += 1
        if self._held[row] == self._most:
            self._widen(row)

    def _widen(self, row: int) -> None:
        pairs = "llvm.x86.avx2.pmadd.wd" if LANES == 8 else "llvm.x86.avx512.pmaddw.d.512"
        wide = call(self._builder, pairs, INTS, [self._words[row], every(WORDS, 1)])
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
        self._scales = builder.mul(blocks, ir.Constant(I64, BLOCK))
        self._sums = builder.mul(blocks, ir.Constant(I64, BLOCK + 4))
        self._blocks = blocks

    def run(self, w: Any) -> list[Any]:
        """[LANES] float32 for each row."""
        builder, kind = self._builder, self._kind
        stop = builder.sdiv(self._blocks, ir.Constant(I64, kind.blocks)) if kind.blocks > 1 else self._blocks
        records = Loop(builder, stop, 1, [every(FLOATS, 0.0)] * len(self._x_rows))
        record = builder.add(w, builder.mul(records.index, ir.Constant(I64, LANES * kind.record_bytes)))
        scale = builder.fpext(load(builder, record, HALVES), FLOATS)
        minimum = None
        if kind.minimum:
            minimum = builder.fpext(load(builder, plus(builder, record, 2 * LANES), HALVES), FLOATS)
        first = plus(builder, record, LANES * kind.head_bytes)
        if kind.blocks == 1:
            totals = self._block(first, records.index, scale, minimum, records.carried)
            records.close(totals)
            return totals
        within = Loop(builder, ir.Constant(I64, kind.blocks), 1, records.carried)
        block = builder.add(first, builder.mul(within.index, ir.Constant(I64, LANES * kind.block_bytes)))
        index = builder.add(builder.mul(records.index, ir.Constant(I64, kind.blocks)), within.index)
        totals = self._block(block, index, scale, minimum, within.carried)
        within.close(totals)
        records.close(totals)
        return totals

    def _block(self, block: Any, index: Any, scale: Any, minimum: Any, totals: list[Any]) -> list[Any]:
        """The totals with the products of 32 inputs added; `scale` and `minimum` of the record."""
        builder, kind = self._builder, self._kind
        for line in range(0, LANES * kind.block_bytes, LINE):
            prefetch(builder, plus(builder, block, _AHEAD + line))
        rows = range(len(self._x_rows))
        sums = [_Sums(builder, kind, [self._start(row, index, part) for row in rows]) for part in range(kind.sums)]
        mine = [builder.add(place, builder.mul(index, ir.Constant(I64, BLOCK))) for place in self._x_rows]
        for quad, weights in self._quads(plus(builder, block, LANES * kind.factor_bytes)):
            for row in rows:
                x = load(builder, plus(builder, mine[row], 4 * quad), I32)
                sums[quad * kind.sums // _QUADS].add(row, weights, x)
        factors = [self._factor(block, number) for number in range(kind.factor_bytes)]
        if kind.factors == 1:
            # Exact: products of 11 and 6 bits
            scale, minimum = builder.fmul(scale, factors[0]), builder.fmul(minimum, factors[1])
        found = []
        for row in rows:
            numbers = [builder.sitofp(part.total(row), FLOATS) for part in sums]
            number = numbers[0]
            if kind.factors == 2:
                number = _fma(builder, numbers[1], factors[1], builder.fmul(number, factors[0]))
            found.append(_fma(builder, number, builder.fmul(scale, self._of_row(row, index, FLOATS)), totals[row]))
        if kind.minimum:
            found = [_fma(builder, minimum, self._of_row(row, index, FLOATS, total=0), found[row]) for row in rows]
        return found

    def _quads(self, numbers: Any) -> Iterator[tuple[int, Any]]:
        """(which four inputs of 32, [4 LANES] bytes of them)"""
        builder, bits = self._builder, self._kind.bits
        if bits == 8:
            for quad in range(_QUADS):
                yield quad, load(builder, plus(builder, numbers, quad * _BYTES), CHARS)
            return
        above = [load(builder, plus(builder, numbers, part * _BYTES), CHARS) for part in range(bits - 4)]
        for chunk in range(_QUADS // 2):
            halves = load(builder, plus(builder, numbers, (bits - 4 + chunk) * _BYTES), CHARS)
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
            words, count = builder.bitcast(chars, WORDS), every(WORDS, abs(left))
            words = builder.shl(words, count) if left > 0 else builder.lshr(words, count)
            chars = builder.bitcast(words, CHARS)
        return builder.and_(chars, every(CHARS, mask))

    def _factor(self, block: Any, number: int) -> Any:
        """[LANES] float32 of the factor so numbered."""
        builder = self._builder
        chars = load(builder, plus(builder, block, LANES * number), ir.VectorType(I8, LANES))
        whole = builder.sext(chars, INTS) if self._kind.factors == 2 else builder.zext(chars, INTS)
        return builder.sitofp(whole, FLOATS)

    def _start(self, row: int, index: Any, part: int) -> Any:
        return self._of_row(row, index, INTS, total=part) if self._kind.zero else every(INTS, 0)

    def _of_row(self, row: int, index: Any, kind: Any, total: int | None = None) -> Any:
        """A row's scale of 32 inputs, or the sum so numbered, in all lanes."""
        builder = self._builder
        each = 1 if total is None else self._kind.sums
        table = self._scales if total is None else self._sums
        offset = builder.mul(index, ir.Constant(I64, 4 * each))
        place = plus(builder, builder.add(builder.add(self._x_rows[row], table), offset), 4 * (total or 0))
        return spread(builder, load(builder, place, kind.element, 4), kind)


def block_tile(rows: int) -> Callable[..., None]:
    """tile(x, x_step, w, kind, blocks, out, out_step): out[r, :LANES] = x[r] W^T for one tile's records at w.

    All are addresses and steps in bytes; x as prepared; `kind` counts `KINDS`; `blocks`, above 0, of 32 inputs."""

    def body(builder: Any, x: Any, x_step: Any, w: Any, number: Any, blocks: Any, out: Any, out_step: Any) -> None:
        x_rows = [builder.add(x, builder.mul(x_step, ir.Constant(I64, row))) for row in range(rows)]
        after, unknown = builder.append_basic_block("done"), builder.append_basic_block("unknown")
        choice = builder.switch(number, unknown)
        with builder.goto_block(unknown):
            builder.unreachable()
        for at, kind in enumerate(KINDS.values()):
            block = builder.append_basic_block(kind.name)
            choice.add_case(ir.Constant(I64, at), block)
            builder.position_at_end(block)
            for row, value in enumerate(_Tile(builder, kind, x_rows, blocks).run(w)):
                place = builder.add(out, builder.mul(out_step, ir.Constant(I64, row)))
                builder.store(value, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
            builder.branch(after)
        builder.position_at_end(after)

    return tile_function(f"pegboard_blocks_{rows}", body)
