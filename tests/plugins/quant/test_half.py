"""Weights stored in 16 bits, computed in float32: nothing is lost, whatever their range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard import SamplingParams
from pegboard.contracts.quantizer import Linear, LinearSpec
from pegboard.linears import DenseParts
from pegboard.testing.tiny import tiny_model
from pegboard_quant.half import HalfLinear, can_halve
from pegboard_quant.linears import PackedLinear

pytestmark = pytest.mark.skipif(not can_halve(), reason="this torch has no products of 16-bit weights")


def make(weight: Tensor, bias: Tensor | None = None) -> HalfLinear:
    return HalfLinear(DenseParts(weight=weight, bias=bias, all_reduce=None, partition=None))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.02, 1.0, 1e4])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_is_as_exact_as_float32(dtype: torch.dtype, size: float, rows: int) -> None:
    """Against float64 on the stored numbers, beside torch's own float32 product of them."""
    weight = (normal(65, 300) * size).to(dtype).float()
    bias, x = normal(65, seed=1).float() * size, normal(rows, 300, seed=2).float()
    exact = x.double() @ weight.double().T + bias
    ours, plain = make(weight, bias)(x), torch.nn.functional.linear(x, weight, bias)
    errors = [(found.double() - exact).norm() for found in (ours, plain)]
    assert errors[0] <= 4 * errors[1] + 2**-24 * exact.norm()


def test_the_whole_range_of_bfloat16() -> None:
    """Rows of very different size in one matrix, most of them far below what float16 holds."""
    weight = (normal(40, 200) * torch.logspace(-12, 0, 40, dtype=torch.float64)[:, None]).bfloat16().float()
    x = normal(5, 200, seed=2).float()
    exact = x.double() @ weight.double().T
    error = (make(weight)(x).double() - exact).norm(dim=0)
    largest = weight.abs().max().item()
    assert (error <= 2**-38 * largest * x.double().norm() + 2**-20 * exact.norm(dim=0)).all()


def test_larger_than_float16_holds() -> None:
    weight = torch.tensor([[1e30, -1e30], [3e30, 1.0]]).bfloat16().float()
    x = torch.tensor([[1.0, 0.5]])
    torch.testing.assert_close(make(weight)(x), x @ weight.T, rtol=1e-6, atol=0)


def test_rows_do_not_depend_on_their_number() -> None:
    linear, x = make(normal(70, 130).bfloat16().float()), normal(37, 130, seed=1).float()
    together = linear(x)
    for part in (slice(0, 1), slice(3, 5), slice(10, 30)):
        assert torch.equal(linear(x[part]), together[part])
    assert linear(x[:0]).shape == (0, 70)


def test_a_broken_row_stays_alone() -> None:
    linear, x = make(normal(20, 30).bfloat16().float()), normal(3, 30, seed=1).float()
    whole = linear(x)
    x[1, 3] = float("nan")
    out = linear(x)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], whole[[0, 2]])


@pytest.mark.supports("Numbers", "bfloat16 and float16 checkpoints in float32 on a CPU, held in 16 bits")
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_16_bit_checkpoint(tmp_path: Path, make_engine: Callable[..., Any], stored: str) -> None:
    """The plan's bytes are those held, and the ids those of the same weights stored in float32."""
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path / "a")
    weights = {n: t.to(getattr(torch, stored)) for n, t in load_file(folder / "model.safetensors").items()}
    wide = tiny_model(tmp_path / "b")
    save_file({n: t.float() for n, t in weights.items()}, wide / "model.safetensors", {"format": "pt"})
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kinds, ids = [], []
    for path in (folder, wide):
        engine = make_engine(path, device="cpu", dtype="float32", max_rows=2)
        layer = engine._phases.executor._runner._parts.model._decoder.layers[0]
        kinds.append(_kind(layer.qkv))
        assert engine.plan.memory.weights == engine._phases.executor.memory().weights
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        ids.append([output.token_ids for output in engine.generate([[5, 9, 11], [7] * 20], sampling)])
    assert kinds == [HalfLinear, PackedLinear]
    assert ids[0] == ids[1]


def test_the_plan_takes_a_mixture_as_float32() -> None:
    from pegboard.contracts.checkpoint import TensorInfo
    from pegboard.contracts.quantizer import Shard
    from pegboard_quant.dense import cpu_float32_matrix_bytes

    spec = LinearSpec(name="qk", sources=("q", "k"), in_features=8, out_features=(4, 4))

    def of(*storages: str) -> int:
        stored = {
            f"{name}.weight": TensorInfo(name=name, shape=(4, 8), storage=storage, nbytes=0)
            for name, storage in zip(("q", "k"), storages, strict=True)
        }
        return cpu_float32_matrix_bytes(spec, stored, Shard(), packs=True)

    assert of("bfloat16", "float16") == of("F16", "BF16") == 8 * 8 * 2
    assert of("bfloat16", "float32") == of("Q8_0", "F16") == 2 * 8 * 8 * 4


def _kind(linear: Linear) -> type:
    return type(linear)
