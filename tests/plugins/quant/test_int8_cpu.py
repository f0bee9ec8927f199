"""Int8CpuQuantizer: precision against float64, independence of rows, memory, refusals, and the real model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from pegboard import ConfigError, SamplingParams
from pegboard.contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard_quant.int8_cpu import FLOAT32_ROWS, Int8CpuQuantizer, Int8Linear
from pegboard_quant.int8_products import FbgemmProduct, OneDnnProduct, Product, best_product, exact_levels
from pegboard_quant.options import Int8CpuOptions

CPU = DeviceFacts(type="cpu")
SPEC = LinearSpec(name="down", sources=("down",), in_features=192, out_features=(160,), bias=True, partition="input")

needs_kernels = pytest.mark.skipif(best_product() is None, reason="this CPU or torch multiplies no bytes")


class OneLinear(Checkpoint):
    """down.weight [160, 192] and down.bias [160], normal, float64; the last channel is all zeros."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.weight = torch.randn(160, 192, generator=generator, dtype=torch.float64)
        self.weight[-1] = 0
        self.bias = torch.randn(160, generator=generator, dtype=torch.float64)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, path: Path) -> Self:
        raise NotImplementedError

    config: Mapping[str, Any] = {}
    generation: Mapping[str, Any] = {}
    tokenizer = TokenizerFiles()

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            f"down.{name}": TensorInfo(name=name, shape=tuple(t.shape), storage="float64", nbytes=t.nbytes)
            for name, t in (("weight", self.weight), ("bias", self.bias))
        }

    def read(
        self,
        name: str,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        dim: int = 0,
        start: int = 0,
        length: int | None = None,
    ) -> Tensor:
        tensor = self.weight if name.endswith("weight") else self.bias
        part = tensor.narrow(dim, start, tensor.shape[dim] - start if length is None else length)
        return part.to(device, getattr(torch, dtype) if dtype else None)

    def close(self) -> None: ...


def quantizer(prefill: str = "int8", activations: str = "int8") -> Int8CpuQuantizer:
    options = Int8CpuOptions.model_validate({"prefill": prefill, "activations": activations})
    need = QuantizerNeed(device=CPU, dtype="float32")
    assert not Int8CpuQuantizer.refusals(need, options)
    return Int8CpuQuantizer.create(need, options)


def make(prefill: str = "int8", activations: str = "int8", shard: Shard | None = None) -> Int8Linear:
    return quantizer(prefill, activations).linear(SPEC, OneLinear(), shard or Shard())


def inputs(rows: int, seed: int = 0) -> Tensor:
    """Rows of very different size, as activations are."""
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * torch.logspace(-3, 3, rows, dtype=torch.float64)[:, None]


def exact(x: Tensor) -> Tensor:
    stored = OneLinear()
    return x @ stored.weight.T + stored.bias


@needs_kernels
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_error_is_within_a_hundredth(rows: int, activations: str) -> None:
    """Two roundings to 127 steps of normal numbers: each about 0.7 % here, more for more inputs."""
    x = inputs(rows)
    product = exact(x) - OneLinear().bias
    error = (make(activations=activations)(x.float()).double() - exact(x)).norm(dim=1) / product.norm(dim=1)
    assert error.square().mean().sqrt() < 1e-2
    assert error.max() < 1.5e-2


@needs_kernels
def test_is_the_product_of_the_rounded_numbers() -> None:
    """The definition, in float64: scales of |largest| / levels, round to the nearest, multiply, scale back."""
    best = best_product()
    assert best is not None
    levels = best[1]
    stored, x = OneLinear(), inputs(9).float().double()
    weight = stored.weight.float().double()
    channel = weight.abs().amax(1, keepdim=True) / 127
    channel[channel == 0] = 1
    row = x.abs().amax(1, keepdim=True) / levels
    # Halves may go either way after float32 rounding: allow one input in a thousand to be a step off
    expected = ((x / row).round() @ (weight / channel).round().T) * row * channel.T + stored.bias
    found = make()(x.float()).double()
    assert ((found - expected).abs() <= 1e-5 * expected.abs().amax(1, keepdim=True)).double().mean() > 0.9
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@needs_kernels
def test_two_bytes_leave_the_rounding_of_the_weights_alone() -> None:
    stored, x = OneLinear(), inputs(9).float().double()
    weight = stored.weight.float().double()
    channel = weight.abs().amax(1, keepdim=True) / 127
    channel[channel == 0] = 1
    product = x @ ((weight / channel).round() * channel).T
    error = make(activations="int16")(x.float()).double() - product - stored.bias
    assert (error.norm(dim=1) <= 1e-4 * product.norm(dim=1) + 1e-6).all()


@needs_kernels
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_a_row_does_not_depend_on_its_neighbours(activations: str) -> None:
    linear, x = make(activations=activations), inputs(65, seed=3).float()
    together = linear(x)
    for part in (slice(0, 1), slice(7, 8), slice(20, 37), slice(64, 65)):
        assert torch.equal(linear(x[part]), together[part])


@needs_kernels
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_zero_and_broken_rows(activations: str) -> None:
    linear, x = make(activations=activations), inputs(3).float()
    x[0] = 0
    x[1, 5] = float("nan")
    out = linear(x)
    torch.testing.assert_close(out[0].double(), OneLinear().bias)
    assert out[1].isnan().all()
    assert torch.equal(out[2:], linear(x[2:]))
    assert linear(x[:0]).shape == (0, 160)


@needs_kernels
def test_float32_takes_over_for_many_rows() -> None:
    linear, x = make("float32"), inputs(FLOAT32_ROWS + 1)
    torch.testing.assert_close(linear(x.float()).double(), exact(x), rtol=1e-4, atol=1e-4)
    few = x[:FLOAT32_ROWS]
    assert torch.equal(linear(few.float()), make()(few.float()))


@needs_kernels
def test_input_shards_sum_to_the_whole_with_one_bias() -> None:
    x, partial = inputs(4), []

    def keep(part: Tensor) -> Tensor:
        partial.append(part.clone())
        return sum(partial[1:], start=partial[0])

    for rank in range(2):
        linear = make(shard=Shard(rank=rank, size=2, all_reduce=keep))
        assert linear.partition == "input"
        out = linear(x[:, rank * 96 : rank * 96 + 96].float())
    assert ((out.double() - exact(x)).norm(dim=1) / exact(x).norm(dim=1)).max() < 1.5e-2


@needs_kernels
def test_bytes() -> None:
    int8 = 160 * 192 + 160 * (4 + 4 + 4)  # scales, zero points, bias
    stored = OneLinear().tensors()
    assert make().weight_bytes == quantizer().bytes_for(SPEC, stored, Shard()) == int8
    assert (
        make("float32").weight_bytes
        == quantizer("float32").bytes_for(SPEC, stored, Shard())
        == int8 + 2 * 160 * 192 * 4
    )
    head = LinearSpec(name="lm_head", sources=("embed",), in_features=8, out_features=(20,), tied=True)
    assert quantizer().bytes_for(head, stored, Shard()) == 20 * (8 + 8) + 20 * 8 * 4
    assert quantizer("float32").bytes_for(head, stored, Shard()) == 20 * (8 + 8) + 3 * 20 * 8 * 4


@needs_kernels
def test_refusals() -> None:
    def of(options: Int8CpuOptions | None = None, **need: Any) -> list[str]:
        full = QuantizerNeed(**{"device": CPU, "dtype": "float32", **need})
        return list(Int8CpuQuantizer.refusals(full, options or Int8CpuOptions()))

    assert not of(batch_invariant=True)
    assert "prefill" in of(Int8CpuOptions(prefill="float32"), batch_invariant=True)[0]
    [cuda] = of(device=DeviceFacts(type="cuda"))
    assert "CPUs only" in cuda
    assert "'none'" in cuda
    [dtype] = of(dtype="float64")
    assert "not float64" in dtype
    [scheme] = of(scheme={"quant_method": "awq"})
    assert "'awq'" in scheme


class Saturating:
    """As without VNNI: pairs of products are added in 16 bits."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        self._weight, self._scales = weight.int(), scales

    def __call__(self, steps: Tensor, levels: int) -> Tensor:
        zero = levels + 1
        products = (steps.int() + zero)[:, None] * self._weight
        sums = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1)
        return (sums - zero * self._weight.sum(1)).float() * self._scales


class Rounding(Saturating):
    def __call__(self, steps: Tensor, levels: int) -> Tensor:
        return super().__call__(steps, 63).bfloat16().float()


class Missing(Saturating):
    def __call__(self, steps: Tensor, levels: int) -> Tensor:
        return torch.ops.pegboard_has_no_such.operator(steps)


def test_a_cpu_that_adds_in_16_bits_gets_smaller_steps() -> None:
    assert exact_levels(Saturating) == 63
    assert exact_levels(Rounding) is None
    assert exact_levels(Missing) is None


@pytest.mark.parametrize("product", [FbgemmProduct, OneDnnProduct])
def test_every_product_is_exact_where_it_is_said_to_be(product: type[Product]) -> None:
    levels = exact_levels(product)
    if levels is None:
        pytest.skip("not on this CPU")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (77, 129), generator=generator, dtype=torch.int8)
    scales = torch.logspace(-3, 3, 77)
    packed = product(weight, scales)
    for rows in (0, 1, 6, 40):
        steps = torch.randint(-levels, levels + 1, (rows, 129), generator=generator)
        exact = (steps @ weight.long().T).double() * scales
        torch.testing.assert_close(packed(steps.float(), levels).double(), exact, rtol=1e-6, atol=0)


@needs_kernels
def test_auto_never_takes_it(make_engine: Callable[..., Any], tiny_path: Path) -> None:
    assert make_engine(tiny_path, device="cpu").plan.parts["quantizer"].name == "none"
    with pytest.raises(ConfigError, match="float64"):
        make_engine(tiny_path, device="cpu", dtype="float64", quantizer="int8-cpu")


@needs_kernels
@pytest.mark.supports("Numbers", "INT8 weights on CPU (quantizer int8-cpu)")
@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"activations": "int8", "prefill": "float32"}], ids=["default", "int8"])
def test_the_real_model_still_counts(make_engine: Callable[..., Any], options: dict[str, str]) -> None:
    choice = {"use": "int8-cpu", "options": options}
    engine = make_engine("smollm2-135m-instruct", device="cpu", max_length=256, max_rows=2, quantizer=choice)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    output = engine.chat([{"role": "user", "content": "Count from 1 to 20."}], sampling)
    assert output.text.startswith("1. 1\n2. 2\n")
