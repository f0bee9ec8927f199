"""What kernels are made of beside Python: numbers at an address, LLVM's vectors, and how functions are compiled."""

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
features: Final[Mapping[str, bool]] = (
    llvm.get_host_cpu_features()
    if config.CPU_FEATURES is None
    else {name[1:]: name.startswith("+") for name in config.CPU_FEATURES.split(",")}
)
#: float32 numbers in a vector register.
WIDTH: Final = 16 if features.get("avx512f") else 8 if features.get("avx2") else 4
#: What sums and products may be changed into; NaN and infinities keep their meaning.
FAST: Final = {"reassoc", "contract", "arcp", "nsz"}

logger = logging.getLogger("pegboard")

intrinsic: Callable[[Callable[..., Any]], Any] = _untyped_intrinsic

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
#: Bytes of a cache line.
LINE: Final = 64

for _name in ("omp_get_num_threads", "omp_get_thread_num", "GOMP_barrier"):
    llvm.add_symbol(_name, address_of(_name) or 0)
#: Threads that run a kernel, and which of them the caller is.
team_size = types.ExternalFunction("omp_get_num_threads", types.int32())
thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
#: Wait for all of them.
barrier = types.ExternalFunction("GOMP_barrier", types.void())


def inner(*, fastmath: set[str] | None = None) -> Callable[[Any], Any]:
    """njit for functions that only kernels call: without what Python would call them by, and with IEEE division."""
    flags = fastmath or False
    return njit(fastmath=flags, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[no-any-return]


def kernel(function: Any) -> Any:
    """A C function of one address that raises nothing. It is kept on disk once it is compiled, where numba keeps such
    things: beside its source, or in the user's own cache, or where NUMBA_CACHE_DIR says. numba compiles anew when the
    file of the kernel has changed, not when what it imports has: who edits this one deletes `__pycache__/*.nbi`."""
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


def _lanes(builder: Any, address: Any) -> Any:
    """WIDTH float32 numbers, wherever they begin, as a pointer."""
    return builder.inttoptr(address, ir.VectorType(_F32, WIDTH).as_pointer())


@intrinsic
def copy_lanes(_: Any, source: Any, target: Any) -> Any:
    """WIDTH float32 numbers from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (_lanes(builder, address) for address in arguments)
        builder.store(builder.load(source, align=4), target, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def turn_lanes(_: Any, x: Any, y: Any, cos: Any, sin: Any, out: Any, turned: Any) -> Any:
    """WIDTH pairs: out = x cos - y sin, turned = y cos + x sin; both are written when all is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, y, cos, sin = (builder.load(_lanes(builder, address), align=4) for address in arguments[:4])
        fused = {"flags": ("contract",)}
        first = builder.fsub(builder.fmul(x, cos, **fused), builder.fmul(y, sin, **fused), **fused)
        second = builder.fadd(builder.fmul(y, cos, **fused), builder.fmul(x, sin, **fused), **fused)
        for value, address in zip((first, second), arguments[4:], strict=True):
            builder.store(value, _lanes(builder, address), align=4)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), generate


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
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any) -> None:
    """Into the second level: the first holds the rows."""
    void = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [void, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # to read, level, data
    builder.call(function, [builder.inttoptr(address, void), *hints])
