"""Register tiles, in LLVM's own vectors: what a loop over numbers can't make the compiler choose.

A row's result does not depend, bit for bit, on how many rows or features a tile has: each sum runs over the same
entries in the same order, in `WIDTH` partial sums that are added up alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _untyped_intrinsic

from .team import address_of

#: What numba compiles for: this CPU, unless NUMBA_CPU_FEATURES says otherwise.
_features: Final[Mapping[str, bool]] = (
    llvm.get_host_cpu_features()
    if config.CPU_FEATURES is None
    else {name[1:]: name.startswith("+") for name in config.CPU_FEATURES.split(",")}
)
#: float32 numbers in a vector register.
WIDTH: Final = 16 if _features.get("avx512f") else 8 if _features.get("avx2") else 4
#: Features of a tile: times its rows, as many sums as fit into the registers (16 of AVX2, else 32) beside what is read.
FEATURES: Final = 3 if WIDTH == 8 else 6
#: Rows of the widest tile.
ROWS: Final = 4
#: Head sizes that attention reads are multiples of this.
HEAD_STEP: Final = 2 * WIDTH
#: Entries whose scores are one tile. Pages hold a multiple of it, so that a tile never leaves its page.
SCORES: Final = 4
#: What sums and products may be changed into; NaN and infinities keep their meaning.
FAST: Final = {"reassoc", "contract", "arcp", "nsz"}

logger = logging.getLogger("pegboard")

intrinsic: Callable[[Callable[..., Any]], Any] = _untyped_intrinsic

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, WIDTH)
_BYTES: Final = 4 * WIDTH
#: Bytes of a cache line.
LINE: Final = 64

for _name in ("omp_get_num_threads", "omp_get_thread_num"):
    llvm.add_symbol(_name, address_of(_name) or 0)
#: Threads that run a kernel, and which of them the caller is.
team_size = types.ExternalFunction("omp_get_num_threads", types.int32())
thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())


def inner(*, fastmath: set[str] | None = None) -> Callable[[Any], Any]:
    """njit for functions that only kernels call: without what Python would call them by, and with IEEE division."""
    flags = fastmath or False
    return njit(fastmath=flags, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[no-any-return]


def kernel(function: Any) -> Any:
    """A C function of one address that raises nothing. It is kept on disk once it is compiled, where numba keeps such
    things: beside its source, or in the user's own cache, or where NUMBA_CACHE_DIR says. numba compiles anew when the
    file of the kernel has changed, not when this one has: who edits this one deletes `__pycache__/*.nbi`."""
    try:
        return cfunc("void(int64)", cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        logger.info("%s is compiled anew in every process: numba finds no folder to keep it in", function.__name__)
        return cfunc("void(int64)", error_model="numpy")(function)


def _reader(number: Any, kind: Any) -> Any:
    @intrinsic
    def read(_: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first = builder.inttoptr(arguments[0], kind.as_pointer())
            return builder.load(builder.gep(first, [arguments[1]]))

        return number(types.int64, types.int64), generate

    return read


#: number `index` of those at `address`: float32, float64, int32, int64. An array's checks for negative places would be
#: in the compiler's way.
get = _reader(types.float32, ir.FloatType())
get_double = _reader(types.float64, ir.DoubleType())
get_int = _reader(types.int32, ir.IntType(32))
get_long = _reader(types.int64, ir.IntType(64))


@intrinsic
def put(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 as number `index` of those at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], _F32.as_pointer())
        builder.store(arguments[2], builder.gep(first, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def float_of_bits(_: Any, bits: Any) -> Any:
    """int32 -> the float32 of the same bits"""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.int32), generate


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """Have the cache line of an address fetched, whatever is there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


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


def _prefetch(builder: Any, address: Any) -> None:
    """Into the second level: the first holds the rows."""
    void = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [void, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # to read, level, data
    builder.call(function, [builder.inttoptr(address, void), *hints])


class _Loop:
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
        following = builder.add(self.index, self._step)
        self.index.add_incoming(following, self._block)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, self._block)
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
        loop = _Loop(builder, stop, _BYTES, [zero] * (rows * features))
        sums, weights = list(loop.carried), []
        for feature in range(features):
            place = builder.add(w_rows[feature], loop.index)
            weights.append(builder.load(_at(builder, place, _VECTOR), align=4))
            if ahead:
                for line in range(0, _BYTES, LINE):
                    later = builder.add(place, distance)
                    _prefetch(builder, builder.add(later, ir.Constant(_I64, line)))
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

    return _tile(f"pegboard_products_{features}x{rows}_{ahead}", body)


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
        loop = _Loop(builder, count, 1, before)
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

    return _tile(f"pegboard_mix_{rows}x{vectors}", body)


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

    return _tile("pegboard_turn", body)


def _spread(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(_I32, 0))
    mask = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), mask)


def _tile(name: str, body: Callable[..., None]) -> Callable[..., None]:
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
