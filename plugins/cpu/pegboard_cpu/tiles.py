"""Register tiles, in LLVM's own vectors: what a loop over numbers can't make the compiler choose.

A row's result does not depend, bit for bit, on how many rows or features a tile has: each sum runs over the same
entries in the same order, in `WIDTH` partial sums that are added up alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vectors import LINE, WIDTH, intrinsic, prefetch

#: Features of a tile: times its rows, as many sums as fit into the registers (16 of AVX2, else 32) beside what is read.
FEATURES: Final = 3 if WIDTH == 8 else 6
#: Rows of the widest tile.
ROWS: Final = 4
#: Head sizes that attention reads are multiples of this.
HEAD_STEP: Final = 2 * WIDTH
#: Entries whose scores are one tile. Pages hold a multiple of it, so that a tile never leaves its page.
SCORES: Final = 4

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, WIDTH)
_BYTES: Final = 4 * WIDTH


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _plus(builder: Any, address: Any, step: Any, count: int) -> Any:
    return builder.add(address, builder.mul(step, ir.Constant(_I64, count)))


def _fma(builder: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")


def _sum(builder: Any) -> Any:
    kind = ir.FunctionType(_F32, [_F32, _VECTOR])
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{WIDTH}f32")


class Loop:
    """for (i = 0; i < stop; i += step), with vectors that are carried from turn to turn."""

    def __init__(self, builder: Any, stop: Any, step: int, carried: list[Any]) -> None:
        self._builder, self._stop, self._step = builder, stop, ir.Constant(_I64, step)
        before, self._block = builder.block, builder.append_basic_block("tile")
        builder.branch(self._block)
        builder.position_at_end(self._block)
        self.index = builder.phi(_I64)
        self.index.add_incoming(ir.Constant(_I64, 0), before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, before)

    def close(self, carried: list[Any]) -> None:
        builder = self._builder
        following, last = builder.add(self.index, self._step), builder.block  # behind a loop within, if there is one
        self.index.add_incoming(following, last)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, last)
        after = builder.append_basic_block("tiled")
        builder.cbranch(builder.icmp_signed("<", following, self._stop), self._block, after)
        builder.position_at_end(after)


def products_tile(features: int, rows: int, *, ahead: int) -> Callable[..., None]:
    """tile(x, x_step, w, w_step, size, out, out_step): out[r, f] = sum over `size` numbers of x[r] * w[f].

    All are addresses of float32 and steps from row to row in bytes; `size` is a multiple of WIDTH, above 0. The rows
    of w that come `ahead` tiles later are fetched into the cache meanwhile (0: none)."""

    def body(builder: Any, x: Any, x_step: Any, w: Any, w_step: Any, size: Any, out: Any, out_step: Any) -> None:
        fma, total = _fma(builder), _sum(builder)
        x_rows = [_plus(builder, x, x_step, row) for row in range(rows)]
        w_rows = [_plus(builder, w, w_step, feature) for feature in range(features)]
        distance = builder.mul(w_step, ir.Constant(_I64, ahead * features))
        zero = ir.Constant(_VECTOR, [0.0] * WIDTH)
        stop = builder.mul(size, ir.Constant(_I64, 4))
        loop = Loop(builder, stop, _BYTES, [zero] * (rows * features))
        sums, weights = list(loop.carried), []
        for feature in range(features):
            place = builder.add(w_rows[feature], loop.index)
            weights.append(builder.load(_at(builder, place, _VECTOR), align=4))
            if ahead:
                for line in range(0, _BYTES, LINE):
                    later = builder.add(place, distance)
                    prefetch(builder, builder.add(later, ir.Constant(_I64, line)))
        for row in range(rows):
            value = builder.load(_at(builder, builder.add(x_rows[row], loop.index), _VECTOR), align=4)
            for feature in range(features):
                at = row * features + feature
                sums[at] = builder.call(fma, [weights[feature], value, sums[at]])
        loop.close(sums)
        for row in range(rows):
            for feature in range(features):
                start = ir.Constant(_F32, 0.0)
                one = builder.call(total, [start, sums[row * features + feature]], fastmath=("reassoc",))
                place = builder.add(_plus(builder, out, out_step, row), ir.Constant(_I64, 4 * feature))
                builder.store(one, _at(builder, place, _F32), align=4)

    return tile_function(f"pegboard_products_{features}x{rows}_{ahead}", body)


def mixing_tile(rows: int, vectors: int) -> Callable[..., None]:
    """tile(p, p_step, v, v_step, count, out, out_step): out[r] += sum over `count` entries of p[r, e] * v[e], for
    `vectors` * WIDTH numbers of out and v. Addresses and steps as for products; `count` above 0."""

    def body(builder: Any, p: Any, p_step: Any, v: Any, v_step: Any, count: Any, out: Any, out_step: Any) -> None:
        fma = _fma(builder)
        p_rows = [_plus(builder, p, p_step, row) for row in range(rows)]
        places = [
            builder.add(_plus(builder, out, out_step, row), ir.Constant(_I64, part * _BYTES))
            for row in range(rows)
            for part in range(vectors)
        ]
        before = [builder.load(_at(builder, place, _VECTOR), align=4) for place in places]
        loop = Loop(builder, count, 1, before)
        sums = list(loop.carried)
        entry = builder.add(v, builder.mul(v_step, loop.index))
        values = [
            builder.load(_at(builder, builder.add(entry, ir.Constant(_I64, part * _BYTES)), _VECTOR), align=4)
            for part in range(vectors)
        ]
        offset = builder.mul(loop.index, ir.Constant(_I64, 4))
        for row in range(rows):
            weight = builder.load(_at(builder, builder.add(p_rows[row], offset), _F32), align=4)
            weight = _spread(builder, weight)
            for part in range(vectors):
                at = row * vectors + part
                sums[at] = builder.call(fma, [weight, values[part], sums[at]])
        loop.close(sums)
        for place, value in zip(places, sums, strict=True):
            builder.store(value, _at(builder, place, _VECTOR), align=4)

    return tile_function(f"pegboard_mix_{rows}x{vectors}", body)


def turning_tile() -> Callable[..., None]:
    """tile(x, x_step, _, _, _, out, out_step): out[i] = the i-th numbers of x[0], x[1], ...; both WIDTH x WIDTH.
    Addresses and steps as for products."""

    def body(builder: Any, x: Any, x_step: Any, _w: Any, _w_step: Any, _size: Any, out: Any, out_step: Any) -> None:
        rows = [builder.load(_at(builder, _plus(builder, x, x_step, row), _VECTOR), align=4) for row in range(WIDTH)]
        half = WIDTH // 2
        while half:
            # Squares of 2 * half: the upper right quarter and the lower left one change places
            upper = [lane if not lane & half else WIDTH + lane - half for lane in range(WIDTH)]
            lower = [lane + half if not lane & half else WIDTH + lane for lane in range(WIDTH)]
            for row in range(WIDTH):
                if not row & half:
                    pair = rows[row], rows[row + half]
                    rows[row], rows[row + half] = (
                        builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, WIDTH), lanes))
                        for lanes in (upper, lower)
                    )
            half //= 2
        for row, value in enumerate(rows):
            builder.store(value, _at(builder, _plus(builder, out, out_step, row), _VECTOR), align=4)

    return tile_function("pegboard_turn", body)


def _spread(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), mask)


def tile_function(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """seven int64 -> nothing, as a function of its own in the module that calls it.

    Not inlined, and not unrolled but by hand ("optsize"): numba has LLVM optimise the same code again in every kernel
    that it gets into, and LLVM 20 once made of an unrolled rest one that stores poison. tests/plugins/cpu therefore
    run what comes from the disk, too."""
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 7)

    def define(module: Any) -> Any:
        if name in module.globals:
            return module.globals[name]
        function = ir.Function(module, kind, name)
        function.linkage = "internal"
        for attribute in ("noinline", "nounwind", "optsize"):
            function.attributes.add(attribute)
        builder = ir.IRBuilder(function.append_basic_block())
        body(builder, *function.args)
        builder.ret_void()
        return function

    @intrinsic
    def tile(_: Any, x: Any, x_step: Any, w: Any, w_step: Any, size: Any, out: Any, out_step: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.call(define(builder.module), arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return tile  # type: ignore[no-any-return]
