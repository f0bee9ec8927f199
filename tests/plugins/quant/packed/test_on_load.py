"""int4 and int8: what is rounded how, and what the report says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.errors import CheckpointError, ConfigError
from pegboard.testing import QuantizerSuite
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint
from pegboard_quant.options import RoundingOptions
from pegboard_quant.packed.linear import GroupLinear
from pegboard_quant.packed.on_load import Int4Quantizer
from pegboard_quant.packed.rounding import round_to_nearest
from pegboard_quant.packed.weight import PackedWeight, dense


class TestInt4(QuantizerSuite):
    part = "int4"
    dtypes = ("float32", "float16", "bfloat16")
    # 15 steps over what 128 normal numbers span, some 5 of their standard deviations
    error = 0.13


class TestInt4Symmetric(QuantizerSuite):
    part = "int4"
    dtypes = ("float32",)
    options = {"symmetric": True, "group": 32}
    error = 0.13


class TestInt8(QuantizerSuite):
    part = "int8"
    dtypes = ("float64", "float32", "bfloat16")
    error = 1.5e-2


class TestInt8Groups(QuantizerSuite):
    """Ranks of 128 columns."""

    part = "int8"
    dtypes = ("float32",)
    options = {"symmetric": False, "group": 64}
    error = 1e-2


@pytest.mark.gpu
class TestInt4OnCuda(TestInt4):
    device = "cuda"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [128, 200])
def test_no_weight_is_off_by_more_than_half_a_step(bits: int, group: int, symmetric: bool, columns: int) -> None:
    """But the outermost."""
    weight = normal(12, columns) * torch.logspace(-3, 2, 12)[:, None]
    weight[3] = 0
    found = dense(round_to_nearest(weight, bits, group, symmetric=symmetric))
    for part, rounded in zip(
        *(t.split(columns if group == -1 else group, dim=1) for t in (weight, found)), strict=True
    ):
        high, low = part.amax(1).clamp(min=0), part.amin(1).clamp(max=0)
        span = 2 * torch.maximum(high, -low) if symmetric else high - low
        step = span / ((1 << bits) - 1)
        off = (rounded - part).abs().amax(1)
        # The scale itself is rounded to 11 bits; a zero point to a whole step
        slack = 1.02 if symmetric else 1.05 if bits == 4 else 1.2
        assert (off <= step * slack * (1.0 if symmetric else 0.5) + span * 2**-10).all()
    assert (found[3] == 0).all()


def test_zero_stays_zero_whatever_the_range() -> None:
    weight = torch.tensor([[0.0, 1e-12, -1e-12, 0.0], [3e5, -1e5, 0.0, 1.0], [5.0, 6.0, 7.0, 0.0]])
    for symmetric in (False, True):
        found = dense(round_to_nearest(weight, 4, -1, symmetric=symmetric))
        assert found.isfinite().all()
        assert (found[weight == 0] == 0).all()


def quantizer(**options: Any) -> Int4Quantizer:
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype="float32")
    return Int4Quantizer.create(need, RoundingOptions(**options))


def test_skipped_sources_of_a_fused_linear_are_exact() -> None:
    spec = LinearSpec(name="a.qkv_proj", sources=("a.q", "a.k", "a.v"), in_features=64, out_features=(32, 16, 16))
    stored = MemoryCheckpoint(
        {f"a.{name}.weight": normal(rows, 64) for name, rows in zip("qkv", (32, 16, 16), strict=True)}
    )
    made = quantizer(skip=("k",), group=32)
    linear = made.linear(spec, stored, Shard())
    assert isinstance(linear, GroupLinear)
    assert [isinstance(piece, PackedWeight) for piece in linear.pieces] == [True, False, True]
    x = normal(5, 64, seed=1)
    torch.testing.assert_close(linear(x)[:, 32:48], x @ stored.stored["a.k.weight"].T)
    assert linear.weight_bytes == made.bytes_for(spec, stored.tensors(), Shard())
    assert quantizer(skip=("qkv_proj",)).linear(spec, stored, Shard()).weight is not None


def test_a_weight_that_is_no_number_is_refused() -> None:
    spec = LinearSpec(name="a", sources=("a",), in_features=64, out_features=(8,))
    weight = normal(8, 64)
    weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        quantizer().linear(spec, MemoryCheckpoint({"a.weight": weight}), Shard())


@pytest.mark.supports("Quantization", "INT4 and INT8 by rounding on load, of any dense checkpoint (int4, int8)")
@pytest.mark.parametrize(("name", "share"), [("int4", 0.36), ("int8", 0.5)])
def test_an_engine(make_engine: Callable[..., Any], tiny_path: Path, name: str, share: float) -> None:
    """Bytes are planned and held."""
    plain = make_engine(tiny_path, device="cpu")
    engine = make_engine(tiny_path, device="cpu", quantizer={"use": name, "options": {"group": 32, "skip": []}})
    planned = engine.plan.memory.weights
    assert planned == engine._phases.executor._runner._parts.model.weight_bytes
    assert planned < share * plain.plan.memory.weights


def test_auto_never_takes_it_and_quantized_checkpoints_are_refused(
    make_engine: Callable[..., Any], tiny_path: Path
) -> None:
    assert make_engine(tiny_path, device="cpu").plan.parts["quantizer"].name == "none"
    with pytest.raises(ConfigError, match="independent of a row's neighbours"):
        make_engine(tiny_path, device="cpu", quantizer="int4", batch_invariant=True)
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype="float32", scheme={"quant_method": "awq"})
    assert "reads dense weights only" in Int4Quantizer.refusals(need, RoundingOptions())[0]


def test_the_report_says_what_is_gained(tiny_path: Path) -> None:
    from pegboard import Registry
    from pegboard.assembly import explain
    from pegboard.config import load_config

    config = load_config({"model": str(tiny_path), "device": "cpu", "quantizer": "int4"})
    (decision,) = [d for d in explain(config, Registry.discover()) if d.role == "quantizer"]
    assert "gains memory, no speed" in decision.notes[0]
    assert "int8-cpu" in decision.notes[0]
