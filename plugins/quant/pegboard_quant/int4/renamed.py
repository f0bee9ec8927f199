"""What Gluon calls differently from one release of Triton to another."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_Memory = gl.shared_memory_descriptor
#: A bulk copy (descriptor, place, barrier, memory, pred=): Triton 3.9 has the first name alone, 3.6 and 3.7 the second.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
#: (memory, dtype, shape, layout): the first name since 3.9.
reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret
