"""LLVM's vectors as the kernels over bytes need them, for llvmlite's builders: `LANES` lanes, four bytes each."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .block_kinds import LANES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS, HALVES = ir.VectorType(F32, LANES), ir.VectorType(ir.HalfType(), LANES)
INTS, WORDS, CHARS = (ir.VectorType(kind, count) for kind, count in ((I32, LANES), (I16, 2 * LANES), (I8, 4 * LANES)))


def plus(builder: Any, address: Any, shift: int) -> Any:
    """address + shift"""
    return builder.add(address, ir.Constant(I64, shift)) if shift else address


def load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    """A number or a vector of type `kind`."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def every(kind: Any, number: float) -> Any:
    """A vector whose lanes all have the constant `number`."""
    return ir.Constant(kind, [number] * kind.count)


def spread(builder: Any, number: Any, kind: Any) -> Any:
    """A vector whose lanes all have the value `number`."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Of one of LLVM's intrinsics."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
