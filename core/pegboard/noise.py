"""The noise that every sampler shares: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

key     = (seed's low 32 bits, seed's high 32 bits)
counter = (token id, position's low 32 bits, position's high 32 bits, 0)
x       = first word of the output
v       = (x + 0.5) * 2**-32, in float64, so 0 < v < 1
gumbel  = -log(-log1p(-v)), in float64

The last word of the counter is 0 for token noise, 1 for seeds derived from a seed, 2 for choices from the residual of a
refused draft and 3 for whether a draft is accepted, so none of them ever meet.
A token id must be below 2**32. Seeds and positions are 64-bit; a signed int64 stands for its two's complement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF

#: Streams: the last word of the counter.
TOKENS: Final = 0
RESIDUAL: Final = 2
ACCEPTANCE: Final = 3

#: Bounds of the noise: v takes 2**32 values, the least and the greatest give these (rounded outwards).
GUMBEL_MIN: Final = -3.13
GUMBEL_MAX: Final = 22.88


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter, in plain integers: four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def child_seed(seed: int, index: int) -> int:
    """The 64-bit seed of continuation `index` (>= 0) of a request with n > 1, as an unsigned integer."""
    words = philox_words((index & _WORD, (index >> 32) & _WORD, 0, 1), (seed & _WORD, (seed >> 32) & _WORD))
    return words[0] | words[1] << 32


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 over int64 tensors that hold 32-bit words and broadcast together: the four output words.

    Products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 product. Only what is multiplied next is masked
    to 32 bits: the upper half of a word that is merely xored does no harm until then.
    """
    import torch

    k0, k1 = key
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))  # type: ignore[no-untyped-call]
    c0, c1, c2, c3 = (word.expand(shape) for word in counter)
    for round in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0 + round * KEY_STEPS[0]).bitwise_and_(_WORD)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1 + round * KEY_STEPS[1]).bitwise_and_(_WORD)
        c1, c3 = product1, product0
    return c0, c1 & _WORD, c2, c3 & _WORD


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int = TOKENS) -> Tensor:
    """Noise [N, M] float64 of `token_ids` ([M], or [N, M]: each row its own) for seeds [N] and positions [N], int64."""
    return _uniform(seeds, positions, token_ids, stream).neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """v [N] float64 for seeds [N] and positions [N], int64, as for token 0."""
    return _uniform(seeds, positions, positions.new_zeros(1), stream)[:, 0]


def _uniform(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    seeds, positions = seeds[:, None], positions[:, None]
    key = (seeds & _WORD, (seeds >> 32) & _WORD)
    last = positions.new_full((), stream)
    words = philox((token_ids, positions & _WORD, (positions >> 32) & _WORD, last), key)
    return words[0].double().add_(0.5).mul_(2.0**-32)
