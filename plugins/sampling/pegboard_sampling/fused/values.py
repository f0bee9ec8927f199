"""What a logit is inside of the kernels: adjusted by its slot's state, ordered as an integer, weighted.

A key packs a token: the logit's bits, ordered, above 2**31 - 1 - id. Keys differ, a greater one comes first: greater
logits, of equals the lower id."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(128)
#: Columns of the slots' float64 and int64 parameters.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, FLOATS = (tl.constexpr(i) for i in range(7))
SEED, KIND, TOP_K, FLAGS, MIN_TOKENS, CHOSEN, LOGPROBS, MAX_LENGTH, INTEGERS = (tl.constexpr(i) for i in range(9))
#: How a row chooses.
GREEDY, NOISE, FEW, WIDE = (tl.constexpr(i) for i in range(4))
#: What WORDS says: whether a choice reads the slot's words, and whether it counts the drafts before it, of a chain or a
#: tree.
NO_WORDS, SLOT_WORDS, DRAFT_WORDS, TREE_WORDS = (tl.constexpr(i) for i in range(4))
#: Bits of FLAGS.
PENALTIES, BIAS, PROCESSED, MANY_STOPS = (tl.constexpr(1 << i) for i in range(4))
#: Bits of a token's word; above them how often it was chosen.
IN_PROMPT, STOP, CHOSEN_ONCE, COUNT_SHIFT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(2)
#: Rows of a chunk's statistics, and of its ids.
MAXIMUM, SUM, NOISY, RAW_MAXIMUM, RAW_SUM, STATISTICS = (tl.constexpr(i) for i in range(6))
FIRST, PICK, IDS = (tl.constexpr(i) for i in range(3))
LOWEST = tl.constexpr(-(1 << 63))
HIGHEST = tl.constexpr((1 << 63) - 1)
#: Weights are summed as integers, so that no order of summation changes a bit.
UNIT = tl.constexpr(float(1 << 40))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def number(floats, slot, WHICH: tl.constexpr):
    return tl.load(floats + slot * FLOATS + WHICH)


@triton.jit
def integer(integers, slot, WHICH: tl.constexpr):
    return tl.load(integers + slot * INTEGERS + WHICH)


@triton.jit
def temperature_of(floats, integers, slot):
    """Greedy rows choose from the logits as they are, at temperature 1."""
    given = number(floats, slot, TEMPERATURE).to(tl.float32)
    return tl.where(integer(integers, slot, KIND) == GREEDY, 1.0, given)


@triton.jit
def alone(floats, integers, slot):
    """Whether the slot has top-p without top-k."""
    no_count = (integer(integers, slot, KIND) == WIDE) & (integer(integers, slot, TOP_K) == 0)
    return no_count & (number(floats, slot, TOP_P) < 1)


@triton.jit
def adjusted(
    x,
    ids,
    real,
    slot,
    row,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    vocab,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Logits x of a row after penalties, bias and the mask of min_tokens; `real` where there is a token. Float32.
    The choice follows queries[row], and places[row] drafts in all, which are not counted among the words yet. In a tree
    each of `queries` has above its 32 bits of id how far before it its parent stands."""
    flags = integer(integers, slot, FLAGS)
    if WORDS:
        chosen = integer(integers, slot, CHOSEN)
        if WORDS >= DRAFT_WORDS:
            chosen += tl.load(places + row)
        early = chosen < integer(integers, slot, MIN_TOKENS)
        penalised = (flags & PENALTIES) != 0
        if early | penalised:
            word = tl.load(words + slot * vocab + ids, mask=real, other=0)
            if WORDS == DRAFT_WORDS:
                for back in range(tl.load(places + row).to(tl.int32)):
                    word += tl.where(tl.load(queries + row - back).to(tl.int32) == ids, CHOSEN_ONCE, 0)
            if WORDS == TREE_WORDS:
                query = queries + row
                for _ in range(tl.load(places + row).to(tl.int32)):
                    entry = tl.load(query)
                    word += tl.where(entry.to(tl.int32) == ids, CHOSEN_ONCE, 0)
                    query -= entry >> 32
            count = word >> COUNT_SHIFT
            repetition = number(floats, slot, REPETITION).to(tl.float32)
            presence = number(floats, slot, PRESENCE).to(tl.float32)
            frequency = number(floats, slot, FREQUENCY).to(tl.float32)
            seen = penalised & (((word & IN_PROMPT) != 0) | (count > 0))
            x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
            x = tl.where(penalised & (count > 0), x - presence - frequency * count.to(tl.float32), x)
            x = tl.where(early & ((word & STOP) != 0), float("-inf"), x)
    if BIASES:
        if (flags & BIAS) != 0:
            x += tl.load(biases + slot * vocab + ids, mask=real, other=0.0)
    return x


@triton.jit
def inverse(temperature):
    """1 / temperature, finite: many quotients for one."""
    return tl.minimum(1.0 / temperature, 3e38)


@triton.jit
def score(x, peak, temperature):
    """(x - peak) / temperature; 0 for the peak, infinite or not."""
    relative = tl.where(x == peak, 0.0, (x - peak) * inverse(temperature))
    return tl.where(x == float("-inf"), float("-inf"), relative)


@triton.jit
def exp(x, FAST: tl.constexpr):
    """exp for sums. FAST: by the device's own instruction alone, which takes what is below 2**-126 for 0."""
    return exp_of_product(x, 1.0, FAST)


@triton.jit
def exp_of_product(x, factor, FAST: tl.constexpr):
    """exp(x * factor) for a scalar factor, as `exp`."""
    if FAST:
        exponent = x * tl.minimum(factor * _LOG2E, 3e38)
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp(x * factor)


@triton.jit
def ordered(x):
    """int32 bits that compare as the floats do."""
    x += 0.0  # -0.0 equals 0.0
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, ids):
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def weight(scores):
    """exp(score) in units of 2**-40, int64."""
    return (tl.exp(scores) * UNIT).to(tl.int64)


@triton.jit
def foremost(noisy_keys, keys):
    """Of keys of perturbed scores the first, and the one of the other keys beside it; 1-dimensional or a tile."""
    best = tl.max(tl.ravel(noisy_keys), 0)
    return best, tl.max(tl.ravel(tl.where(noisy_keys == best, keys, LOWEST)), 0)


@triton.jit
def first_of_best(x, ids):
    """The greatest x and the lowest id that has it; x is 1-dimensional or a tile."""
    best = tl.max(tl.ravel(x), 0)
    return best, tl.min(tl.ravel(tl.where(x == best, ids, 0x7FFFFFFF)), 0)
