"""What a step on a CPU frees is kept for the next one.

A prompt of 512 tokens makes and drops some ten megabytes a layer. glibc returns a freed block to the system where it
was mapped by itself, or where more than a threshold is free behind it, and the next layer pays for every page anew:
3 us for each on a virtual machine, a tenth of a small model's prefill. Both thresholds grow with the largest block
that was mapped by itself and freed, up to 32 MiB; a block that nobody has written to costs nothing.
"""

from __future__ import annotations

import ctypes

import torch

#: Bytes of the largest block that moves the thresholds, with room for what an allocator puts around it.
_LARGEST = (32 << 20) - (64 << 10)


def keep() -> None:
    """From now on the C library keeps up to 64 MiB of what is freed, for the whole process, as it would once the
    application itself had freed an array of that size. Other C libraries than glibc are not changed."""
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")


def give_back() -> None:
    """What is kept and not in use, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
