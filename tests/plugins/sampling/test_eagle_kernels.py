"""Attention of the EAGLE layer in Triton against plain torch: on a CUDA device, and on a CPU under Triton's
interpreter, in a process of its own; and what it compiles to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.contracts.sampler import SamplingParams, SlotOpening
from pegboard.models.llama import LlamaConfig
from pegboard_sampling.speculation.eagle_cache import EntryCache
from pegboard_sampling.speculation.eagle_fused import FusedEntryCache
from pegboard_sampling.speculation.eagle_layer import EagleLayer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# numpy warns of infinities and of what is no number
here = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
SLOTS, ENTRIES = 5, 150


def layer(heads: int, shared: int, size: int, dtype: torch.dtype, device: str, **rope: Any) -> EagleLayer:
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": size,
        "max_position_embeddings": 512,
        "vocab_size": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "hidden_act": "silu",
        **rope,
    }
    raw = LlamaConfig.complete(config)
    weights = {"fc.weight": torch.zeros(32, 64, dtype=dtype, device=device)}
    return EagleLayer(LlamaConfig.read(raw), raw, weights, ENTRIES)


def opening(slot: int, length: int) -> SlotOpening:
    return SlotOpening(slot=slot, sampling=SamplingParams(), seed=0, prompt=(0,) * length, max_length=ENTRIES)


def caches(dtype: torch.dtype, heads: int, shared: int, size: int, **rope: Any) -> tuple[EntryCache, FusedEntryCache]:
    """The reference computes in float64."""
    made = layer(heads, shared, size, dtype, DEVICE, **rope)
    wide = layer(heads, shared, size, torch.float64, DEVICE, **rope)
    device = torch.device(DEVICE)
    return (
        EntryCache(wide, SLOTS, ENTRIES, torch.float64, device),
        FusedEntryCache(made, SLOTS, ENTRIES, dtype, device),
    )


SHAPES = [
    (torch.float32, 4, 2, 8, {}),
    (torch.float16, 6, 1, 40, {"partial_rotary_factor": 0.5}),
    # The interpreter multiplies bfloat16 as the integers that stand for it
    (torch.float16 if INTERPRETED else torch.bfloat16, 2, 2, 128, {}),
]
#: Much like the others, and long for the interpreter.
MORE = [(torch.float32, 9, 3, 64, {"partial_rotary_factor": 0.5}), (torch.float16, 6, 1, 40, {})]


@here
@pytest.mark.parametrize(
    ("dtype", "heads", "shared", "size", "rope"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.full if INTERPRETED else ()) for shape in MORE)],
)
def test_it_mixes_what_torch_does(dtype: torch.dtype, heads: int, shared: int, size: int, rope: dict[str, Any]) -> None:
    """Prompts in pieces, from the first entry and from behind a cached prefix, then steps that keep some of their
    entries; what is beyond them is NaN."""
    draw = torch.Generator().manual_seed(0)
    both = caches(dtype, heads, shared, size, **rope)
    begins = {3: 0, 0: 21, 4: 70}
    lengths = {3: 90, 0: 40, 4: 71}
    allowed = 1e-5 if dtype == torch.float32 else 2e-2

    def check(slots: list[int], starts: list[int], counts: list[int], width: int) -> None:
        qkv = torch.randn(len(slots), width, heads + 2 * shared, size, generator=draw).to(dtype)
        for row, count in enumerate(counts):
            qkv[row, count:] = float("nan")
        asked = [torch.tensor(part, device=DEVICE) for part in (slots, starts, counts)]
        expected, found = (
            cache.attend(qkv.to(cache.keys), asked[0], asked[1], asked[2]).cpu().double() for cache in both
        )
        for row, count in enumerate(counts):
            torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=allowed, atol=allowed)

    for cache in both:
        cache.open([opening(slot, length) for slot, length in lengths.items()])
    for slot, begin in begins.items():
        for start in range(begin, lengths[slot] - 1, 37):
            for cache in both:
                cache.begin(slot, start)
            width = min(37, lengths[slot] - 1 - start)
            check([slot], [start], [width], width)
    slots = list(lengths)
    for counts in ([1, 4, 2], [0, 3, 4], [4, 1, 1]):
        check(slots, [lengths[slot] - 1 for slot in slots], counts, 4)
        for slot, count in zip(slots, counts, strict=True):
            lengths[slot] += count
        check(slots, [lengths[slot] - 1 for slot in slots], [1, 1, 1], 1)
    for cache in both:  # a new text, of one token
        cache.open([opening(3, 1)])
    check([3], [0], [4], 4)
    check([3], [ENTRIES - 4], [3], 3)


@pytest.mark.skipif(INTERPRETED, reason="runs in itself")
@pytest.mark.long
def test_under_the_interpreter(run_interpreted: Callable[[Path], str]) -> None:
    count = len(SHAPES) + len(MORE) * bool(os.environ.get("PEGBOARD_FULL"))
    assert f"{count} passed" in run_interpreted(Path(__file__))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.full)])
@pytest.mark.parametrize("width", [1, 5])
def test_nothing_spills(compile_for: Callable[..., Any], capability: int, width: int) -> None:
    made = layer(32, 8, 128, torch.bfloat16, "cpu")
    cache = FusedEntryCache(made, SLOTS, ENTRIES, torch.bfloat16, torch.device("cpu"))
    index = torch.zeros(1, dtype=torch.int64)
    with compile_for(capability) as compiled:
        cache.attend(torch.zeros(1, width, 48, 128, dtype=torch.bfloat16), index, index, index)
    assert [kernel.kernel for kernel in compiled] == ["turn_and_write", "attend_entries"]
    assert all(kernel.stack == 0 for kernel in compiled)
