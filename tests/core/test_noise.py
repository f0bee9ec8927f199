"""The noise against published vectors, plain integers, and its distribution."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
import torch

from pegboard.noise import GUMBEL_MAX, GUMBEL_MIN, child_seed, gumbel, philox, philox_words

# Known answers of Random123 (kat_vectors, philox4x32 10)
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox_words(counter, key) == expected
    words = philox(
        tuple(torch.tensor([w]) for w in counter),  # type: ignore[arg-type]
        tuple(torch.tensor([w]) for w in key),  # type: ignore[arg-type]
    )
    assert tuple(int(w) for w in words) == expected


def test_tensors_agree_with_integers_and_broadcast() -> None:
    draw = random.Random(1)
    rows = [[draw.getrandbits(32) for _ in range(6)] for _ in range(200)]
    columns = torch.tensor(rows).T
    words = torch.stack(philox(tuple(columns[:4]), tuple(columns[4:])), dim=1)  # type: ignore[arg-type]
    assert words.tolist() == [list(philox_words(tuple(row[:4]), tuple(row[4:]))) for row in rows]


def test_gumbel_follows_its_definition() -> None:
    seeds = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 0x123456789ABCDEF]
    positions = [0, 7, (1 << 33) + 5, 1, 2, 3]
    ids = [0, 1, 49151, (1 << 32) - 1]
    noise = gumbel(torch.tensor(seeds), torch.tensor(positions), torch.tensor(ids))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, token in enumerate(ids):
            counter = (token, position & 0xFFFFFFFF, position >> 32, 0)
            word = philox_words(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[0]
            v = (word + 0.5) * 2.0**-32
            assert float(noise[row, column]) == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-14, abs=1e-14)
    own = gumbel(torch.tensor(seeds), torch.tensor(positions), torch.tensor([ids] * len(seeds)))
    assert torch.equal(own, noise)
    assert noise.dtype == torch.float64


def test_bounds_of_the_noise() -> None:
    v = torch.tensor([0.5, 2**32 - 0.5], dtype=torch.float64) * 2.0**-32
    high, low = (-(-(-v).log1p()).log()).tolist()
    assert GUMBEL_MIN < low < GUMBEL_MIN + 0.01
    assert GUMBEL_MAX - 0.01 < high < GUMBEL_MAX


def test_the_noise_is_gumbel_distributed() -> None:
    noise = gumbel(torch.arange(10), torch.arange(10), torch.arange(20000)).flatten().sort().values
    uniform = (-(-noise).exp()).exp()
    ranks = (torch.arange(noise.shape[0], dtype=torch.float64) + 0.5) / noise.shape[0]
    assert float((uniform - ranks).abs().max()) * noise.shape[0] ** 0.5 < 1.95  # Kolmogorov-Smirnov, 0.1 %


def test_child_seeds_differ_from_each_other_and_from_token_noise() -> None:
    seeds = {child_seed(seed, index) for seed in (0, 1, (1 << 64) - 1) for index in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert child_seed(-1, 3) == child_seed((1 << 64) - 1, 3)
    assert child_seed(5, 0) & 0xFFFFFFFF != philox_words((0, 0, 0, 0), (5, 0))[0]
    words = philox_words((3, 0, 0, 1), (5, 0))
    assert child_seed(5, 3) == words[0] | words[1] << 32


def test_child_seeds_need_no_torch() -> None:
    code = "import sys, pegboard.noise as n; n.child_seed(1, 2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
