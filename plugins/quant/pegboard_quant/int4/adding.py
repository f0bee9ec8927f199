"""The way of sums to `out`, also of those that several programs make in parts. A sum has BN outputs n and BM rows m.

A word of `counters` for each sum, 0 between launches, counts the programs that have stored their part; who comes last
adds them. It reads slowly, alone: with SPREAD the others wait for it, a short while, and each adds a piece. Who has
waited long enough says so in the word and goes, and its piece is added by who comes last. So none waits for a program
that can't start, and which of them adds a piece changes nothing in it."""

from __future__ import annotations

import triton
import triton.language as tl

#: Of a word: programs that have stored, then a bit for each that has gone.
_COUNT = tl.constexpr(0xFF)
_GONE = tl.constexpr(8)
#: Looks at the word before a program goes; one takes some 0.6 us.
_POLLS = tl.constexpr(8)


@triton.jit
def finish(
    total, bias, out, partial, counters, m, n, M, N, OUT_STRIDE, block, part, parts,
    BLOCKS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, UNEVEN: tl.constexpr,
    SPREAD: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Stores the sum. Several parts are added in their order."""
    if parts > 1:
        size = BLOCKS * tl.num_programs(2) * (BN * BM)
        sums = tl.program_id(2) * BLOCKS + block
        partial += sums * (BN * BM)
        at = partial + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(at + part * size, total)
        tl.debug_barrier()
        if SPREAD:
            duties = _duties(counters + sums, part, SPLIT)
        else:
            last = tl.atomic_add(counters + sums, 1, sem="acq_rel") == SPLIT - 1
            duties = last.to(tl.int32) * ((1 << SPLIT) - 1)
            if last:
                tl.store(counters + sums, 0)
        if SPREAD or UNEVEN:
            # In a layout that suits memory, not the product
            PIECES: tl.constexpr = max(4, triton.next_power_of_2(SPLIT))
            ROWS: tl.constexpr = BN // PIECES
            for i in range(PIECES):
                if (duties >> (i % SPLIT)) & 1 != 0:
                    piece_m, piece_n = tl.arange(0, BM), i * ROWS + tl.arange(0, ROWS)
                    piece = _added(partial + piece_n[:, None] * BM + piece_m[None, :], size, SPLIT)
                    to_m, to_n = tl.program_id(2) * BM + piece_m, block * BN + piece_n
                    _store(piece, bias, out, to_m, to_n, M, N, OUT_STRIDE, BIAS, ADDS)
        elif duties != 0:
            total = _added(at, size, SPLIT)
            _store(total, bias, out, m, n, M, N, OUT_STRIDE, BIAS, ADDS)
    else:
        _store(total, bias, out, m, n, M, N, OUT_STRIDE, BIAS, ADDS)


@triton.jit
def _duties(word, part, SPLIT: tl.constexpr):
    """A bit for each part whose pieces this program is to add; it has stored its own part."""
    before = tl.atomic_add(word, 1, sem="acq_rel")
    duties = 1 << part
    if before & _COUNT == SPLIT - 1:
        tl.atomic_add(word, -1 - before, sem="relaxed")
        duties |= before >> _GONE
    else:
        seen, polls = before + 1, 0
        while _incomplete(seen, SPLIT) and polls < _POLLS:
            seen = tl.atomic_add(word, 0, sem="acquire")
            polls += 1
        if _incomplete(seen, SPLIT):
            if _incomplete(tl.atomic_add(word, duties << _GONE, sem="acquire"), SPLIT):
                duties = 0
            else:  # who came last does not know of it
                tl.atomic_add(word, -(duties << _GONE), sem="relaxed")
    return duties


@triton.jit
def _incomplete(seen, SPLIT: tl.constexpr):
    """Whether parts lacked when a program that had stored its own saw this word. Who comes last takes it back to 0."""
    return (seen & _COUNT) % SPLIT != 0


@triton.jit
def _added(at, size, SPLIT: tl.constexpr):
    total = tl.zeros(at.shape, tl.float32)
    for s in tl.static_range(SPLIT):
        total += tl.load(at + s * size, cache_modifier=".cg")
    return total


@triton.jit
def _store(total, bias, out, m, n, M, N, OUT_STRIDE, BIAS: tl.constexpr, ADDS: tl.constexpr):
    """total [outputs n, rows m] with the bias, with ADDS to what `out` holds."""
    mask = (m[None, :] < M) & (n[:, None] < N)
    out_at = out + m[None, :].to(tl.int64) * OUT_STRIDE + n[:, None]
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
