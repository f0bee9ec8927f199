"""Quantizer `blocks-cpu`: what it computes by its definition, what it fuses, what it leaves to others, and the real
model. The gguf package says what blocks mean."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
pytest.importorskip("gguf")

from pegboard import ConfigError, Registry, SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.ops import Norm
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.linears import read_blocks
from pegboard.ops import TorchOps
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint
from pegboard.testing.oracles.gguf_blocks import block_size, meant, quantized, random_blocks
from pegboard_cpu import manifest, vectors
from pegboard_cpu.blocks import BlocksLinear
from pegboard_cpu.blocks_quantizer import BlocksCpuQuantizer
from pegboard_cpu.ops import NumbaOps

CPU = DeviceFacts(type="cpu")
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
#: Greedy ids of "Count from 1 to 20." with the model in float32.
COUNTED = [33, 30, 216, 33, 198, 34, 30, 216, 34, 198, 35, 30, 216, 35, 198, 36]
COUNTED += [30, 216, 36, 198, 37, 30, 216, 37, 198, 38, 30, 216, 38, 198, 39, 30]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(*kinds: str, rows: int = 40, columns: int = 96, bias: bool = False, **changes: Any) -> Any:
    """A checkpoint of sources of these kinds, its spec, and the weight that it means, float64."""
    spec = LinearSpec(
        name="proj",
        sources=tuple(f"s{number}" for number in range(len(kinds))),
        in_features=columns,
        out_features=(rows,) * len(kinds),
        bias=bias,
        **changes,
    )
    dense, blocks = {}, {}
    for number, kind in enumerate(kinds):
        name = f"s{number}.weight"
        blocks[name] = quantized(normal(rows, columns, seed=number), kind)
        dense[name] = meant(blocks[name], kind)
        if bias:
            dense[f"s{number}.bias"] = normal(rows, seed=100 + number)
    storages = {f"s{number}.weight": kind for number, kind in enumerate(kinds)}
    weight = torch.cat([dense[name] for name in storages]).double()
    return MemoryCheckpoint(dense, storages=storages, blocks=blocks), spec, weight


def quantizer() -> BlocksCpuQuantizer:
    return BlocksCpuQuantizer.create(QuantizerNeed(device=CPU, dtype="float32"), None)


def rounded(x: Tensor) -> Tensor:
    """x in 127 steps of the largest of each 32, float64."""
    groups = x.double().unflatten(1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    step[step == 0] = 1
    return ((groups / step).round() * step).flatten(1)


def columns_of(kind: str, columns: int) -> int:
    """At least so many, in whole blocks."""
    block = block_size(kind)[0]
    return -(-columns // block) * block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 32), (33, 96), (3, 576), (200, 1536)])
def test_is_the_product_of_the_rounded_rows_and_the_weights(kind: str, rows: int, columns: int) -> None:
    columns = columns_of(kind, columns)
    checkpoint, spec, weight = stored(kind, kind, rows=rows, columns=columns)
    linear = quantizer().linear(spec, checkpoint, Shard())
    assert isinstance(linear, BlocksLinear)
    for count in (1, 3, 4, 9, 33):
        x = normal(count, columns, seed=7)
        found, product = linear(x).double(), rounded(x) @ weight.T
        # Halves may go either way after float32 rounding: few inputs are a step off
        torch.testing.assert_close(found, product, rtol=0, atol=2e-3 * product.abs().max().item())
        assert ((found - product).norm(dim=1) / product.norm(dim=1)).median() < 1e-6
        exact = x.double() @ weight.T
        assert ((found - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_the_files(kind: str) -> None:
    """x is one number of 127 steps at a time: nothing is rounded but the products of a code, 127 and a scale, and a
    sum with the minimum. Codes, factors and signs are random bits."""
    columns = columns_of(kind, 96)
    blocks = random_blocks(kind, 40, columns, seed=3)
    weight = meant(blocks, kind)
    spec = LinearSpec(name="proj", sources=("s0",), in_features=columns, out_features=(40,))
    checkpoint = MemoryCheckpoint({"s0.weight": weight}, storages={"s0.weight": kind}, blocks={"s0.weight": blocks})
    found = quantizer().linear(spec, checkpoint, Shard())(127 * torch.eye(columns)).T / 127
    largest = weight.unflatten(1, (-1, block_size(kind)[0])).abs().amax(-1, keepdim=True)
    error = (found.double() - weight.double()).unflatten(1, (-1, block_size(kind)[0])).abs()
    # The parts of a difference are at most three times as large as the largest of the block
    assert (error <= 2.0**-21 * largest).all()


def full_blocks(kind: str) -> Tensor:
    """[16 rows, 3 blocks of bytes]: all bits of numbers set, and in half of the rows the least that has a sign."""
    nbytes = block_size(kind)[1]
    blocks = torch.full((16, 3, nbytes), 0xFF, dtype=torch.uint8)
    if kind in ("Q4_0", "Q5_0"):
        blocks[:8] = 0
    if kind == "Q8_0":
        blocks[:8] = 0x80
    if kind == "Q6_K":
        blocks[:8, :, :192] = 0
        blocks[:, :, 192:208] = torch.tensor([127, 0x80] * 8)  # factors, with sign
    scales = torch.tensor([1.0, 0.5], dtype=torch.float16).view(torch.uint8)
    if kind == "Q6_K":
        blocks[..., 208:] = scales[:2]
    else:
        heads = 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        blocks[..., :heads] = scales[:heads]
    return blocks.flatten(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_numbers_do_not_overflow(kind: str, sign: int) -> None:
    """All bits of the weights set, or the least with a sign, against 127 everywhere: nothing but sums is rounded."""
    blocks, columns = full_blocks(kind), 3 * block_size(kind)[0]
    weight = meant(blocks, kind)
    spec = LinearSpec(name="proj", sources=("s0",), in_features=columns, out_features=(16,))
    checkpoint = MemoryCheckpoint({"s0.weight": weight}, storages={"s0.weight": kind}, blocks={"s0.weight": blocks})
    x = torch.full((5, columns), 127.0 * sign)
    x[1:, ::2] *= -1
    found = quantizer().linear(spec, checkpoint, Shard())(x)
    # What is cancelled within a row is rounded, too
    size = x.double().abs() @ weight.double().abs().T
    error = (found.double() - x.double() @ weight.double().T).abs()
    assert (error <= 1e-6 * size.clamp(min=1)).all()


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q6_K", "Q6_K"), ("Q4_K", "Q6_K")], ids="+".join)
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_ops_fuse_what_stands_around_it(kinds: tuple[str, str], rows: int, activation: Any, bias: bool) -> None:
    columns = columns_of(kinds[0], 192)
    checkpoint, spec, _ = stored(*kinds, rows=160, columns=columns, bias=bias)
    linear = quantizer().linear(spec, checkpoint, Shard())
    assert isinstance(linear, BlocksLinear)
    assert linear.fuses(activation) == (activation is None or kinds[0] == kinds[1])
    x = normal(rows, columns, seed=1) * torch.logspace(-2, 2, rows)[:, None]
    residual = normal(rows, 160 if activation else 320, seed=2)
    norm = Norm(weight=normal(columns, seed=3), eps=1e-5, offset=1.0)
    given = {"norm": norm, "activation": activation}
    found = NumbaOps(False).project(x, linear, **given, residual=residual.clone())
    # A norm that is rounded otherwise moves few inputs by a step
    expected = TorchOps().project(x, linear, **given, residual=residual.clone())
    assert ((found - expected).norm() / expected.norm()) < 2e-3
    bare = NumbaOps(False).project(x, linear)
    assert torch.equal(bare, linear(x))


def test_halves_that_are_no_whole_tiles_are_gated_apart() -> None:
    checkpoint, spec, weight = stored("Q4_0", "Q4_0", rows=20, columns=64)
    linear = quantizer().linear(spec, checkpoint, Shard())
    x = normal(3, 64, seed=1)
    gate, up = (rounded(x) @ weight.T).chunk(2, dim=1)
    found = NumbaOps(False).project(x, linear, activation="silu")
    torch.testing.assert_close(found.double(), torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-3)


def test_zero_and_broken_rows() -> None:
    checkpoint, spec, _ = stored("Q4_1", bias=True)
    linear = quantizer().linear(spec, checkpoint, Shard())
    x = normal(9, 96, seed=1)
    x[0], x[1, 5], x[2, 90], x[3] = 0, torch.nan, torch.inf, 1e-40
    out = linear(x)
    assert torch.equal(out[0], checkpoint.stored["s0.bias"])
    assert not out[1:3].isfinite().any()
    torch.testing.assert_close(out[3], out[0])
    assert torch.equal(out[4:], linear(x[4:]))
    assert linear(x[:0]).shape == (0, 40)


@pytest.mark.parametrize(
    ("kinds", "columns"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 512),
        (("Q8_0", "Q5_0", "Q5_0"), 96),
        (("Q4_1", "Q6_K", "Q5_K"), 256),
        (("Q4_0", "Q8_0", "Q4_0"), 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("partition", [None, "output", "input"])
def test_sources_of_several_types(kinds: tuple[str, ...], columns: int, partition: Any, caplog: Any) -> None:
    """Each has its rows of the result, its rows of the bias, and its bytes; ranks have parts of each."""
    checkpoint, spec, weight = stored(*kinds, columns=columns, partition=partition, bias=True)
    bias = torch.cat([checkpoint.stored[f"{source}.bias"] for source in spec.sources])
    size = 1 if partition is None or columns // 2 % block_size(kinds[-1])[0] else 2
    parts, makes = [], quantizer()
    for rank in range(size):
        shard = Shard(rank=rank, size=size, all_reduce=lambda part: part.clone())
        linear = makes.linear(spec, checkpoint, shard)
        assert isinstance(linear, BlocksLinear)
        assert linear.weight_bytes == makes.bytes_for(spec, checkpoint.tensors(), shard)
        parts.append(linear)
    x = normal(6, columns, seed=1)
    expected = rounded(x) @ weight.T + bias.double()
    if partition == "output" and size == 2:
        halves = [linear(x).view(6, 3, 20) for linear in parts]
        found = torch.cat(halves, 2).flatten(1)
    elif partition == "input" and size == 2:
        half = columns // 2
        found = parts[0](x[:, :half]) + parts[1](x[:, half:]) - bias
    else:
        found = parts[0](x)
        alone = torch.cat([parts[0](row) for row in x.split(1)])
        assert torch.equal(found, alone)
    assert ((found - expected).norm() / expected.norm()) < 1e-3
    assert not caplog.records


@pytest.mark.parametrize("kinds", [("MXFP4",), ("Q4_0", "MXFP4")], ids="+".join)
def test_what_has_no_kernel_is_dequantised_and_said(kinds: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, spec, weight = stored(*kinds, bias=True)
    makes = quantizer()
    with caplog.at_level("WARNING", logger="pegboard"):
        linear = makes.linear(spec, checkpoint, Shard())
        makes.linear(spec, checkpoint, Shard())
    assert caplog.text.count("dequantised") == 1  # once a kind, not once a layer
    assert " and ".join(sorted(kinds)) in caplog.text
    assert linear.weight is not None
    assert torch.equal(linear.weight.double(), weight)
    assert (
        linear.weight_bytes
        == makes.bytes_for(spec, checkpoint.tensors(), Shard())
        == 4 * (weight.numel() + len(weight))
    )
    x = normal(3, 96, seed=1)
    exact = x.double() @ weight.T + torch.cat([checkpoint.stored[f"{s}.bias"] for s in spec.sources])
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_columns_of_a_rank_that_are_no_whole_blocks_are_dequantised(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, spec, weight = stored("Q4_0", columns=96, partition="input")
    x, out = normal(2, 96, seed=1), torch.zeros(2, 40)
    with caplog.at_level("WARNING", logger="pegboard"):
        for rank in range(2):
            shard = Shard(rank=rank, size=2, all_reduce=lambda part: part)
            out += quantizer().linear(spec, checkpoint, shard)(x[:, 48 * rank : 48 * rank + 48])
    assert "dequantised" in caplog.text
    torch.testing.assert_close(out.double(), x.double() @ weight.T, rtol=1e-5, atol=1e-5)


def test_blocks_of_a_rank_are_whole() -> None:
    checkpoint, spec, _ = stored("Q4_0", "Q4_0", columns=128, partition="input", bias=True)
    read = {"blocks": [(32, 18), (32, 18)]}
    shard = Shard(rank=1, size=2, all_reduce=lambda part: part)
    parts = read_blocks(spec, checkpoint, shard, "float32", "cpu", **read)
    for number, weight in enumerate(parts.weights):
        assert torch.equal(weight, checkpoint.blocks[f"s{number}.weight"][:, 36:])
    assert (parts.partition, parts.all_reduce) == ("input", shard.all_reduce)
    with pytest.raises(ConfigError, match="no whole blocks of 32"):
        read_blocks(spec, checkpoint, Shard(rank=0, size=8, all_reduce=shard.all_reduce), "float32", "cpu", **read)


@pytest.mark.parametrize(("columns", "packed"), [(768, False), (512, True)])
def test_columns_of_a_rank_that_are_no_whole_blocks_of_256(columns: int, packed: bool, caplog: Any) -> None:
    checkpoint, spec, weight = stored("Q4_K", columns=columns, partition="input")
    shard, makes = Shard(rank=1, size=2, all_reduce=lambda part: part), quantizer()
    with caplog.at_level("WARNING", logger="pegboard"):
        linear = makes.linear(spec, checkpoint, shard)
    assert linear.weight_bytes == makes.bytes_for(spec, checkpoint.tensors(), shard)
    if packed:
        assert isinstance(linear, BlocksLinear)
        assert not caplog.records
    else:
        assert linear.weight is not None
        assert torch.equal(linear.weight.double(), weight[:, columns // 2 :])
        assert "Q4_K in 768 columns" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_files(kind: str) -> None:
    """But for the factors of Q4_K and Q5_K, which have 6 bits there and a byte each in memory."""
    numbers, block = block_size(kind)
    checkpoint, spec, _ = stored(kind, rows=64, columns=3 * numbers, bias=True)
    own = 64 * 3 * (block + (4 if kind in ("Q4_K", "Q5_K") else 0)) + 64 * 4
    assert quantizer().bytes_for(spec, checkpoint.tensors(), Shard()) == own
    assert quantizer().linear(spec, checkpoint, Shard()).weight_bytes == own


def test_refusals() -> None:
    def of(**need: Any) -> list[str]:
        full = QuantizerNeed(**{"device": CPU, "dtype": "float32", "storages": frozenset({"Q4_1", "float32"}), **need})
        return list(BlocksCpuQuantizer.refusals(full, None))

    assert of() == of(batch_invariant=True) == []
    [cuda] = of(device=DeviceFacts(type="cuda"))
    assert "CPUs only" in cuda
    assert "'none'" in cuda
    [dtype] = of(dtype="bfloat16")
    assert "not bfloat16" in dtype
    [scheme] = of(scheme={"quant_method": "awq"})
    assert "'awq'" in scheme
    [kinds] = of(storages=frozenset({"Q3_K", "float32"}))
    assert "Q3_K" in kinds


@pytest.fixture(scope="module")
def plugins() -> list[Any]:
    """The manifest, unless it is installed."""
    return (
        [] if any(entry.part.name == "blocks-cpu" for entry in Registry.discover().parts("quantizer")) else [manifest]
    )


SETTINGS: dict[str, Any] = {"device": "cpu", "max_length": 256, "max_rows": 4}


@pytest.mark.model
@pytest.mark.supports("Numbers", "GGUF weights kept quantized on a CPU: Q4_0, Q4_1, Q8_0 (quantizer blocks-cpu)")
def test_the_real_model_counts_as_in_float32(make_engine: Callable[..., Any], plugins: list[Any]) -> None:
    engine = make_engine("smollm2-135m-instruct", quantizer="blocks-cpu", plugins=plugins, **SETTINGS)
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    message = [{"role": "user", "content": "Count from 1 to 20."}]
    assert list(engine.chat(message, sampling).token_ids) == COUNTED
    # Rows of a step do not change each other
    prompts = [[5, 6, 7], list(range(40, 90)), [9] * 12]
    alone = [engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in engine.generate(prompts, sampling)] == alone


@pytest.mark.model
@pytest.mark.parametrize(("objective", "chosen"), [("throughput", "none"), ("memory", "blocks-cpu")])
def test_auto_takes_it_for_memory_only(
    objective: str, chosen: str, make_engine: Callable[..., Any], plugins: list[Any]
) -> None:
    engine = make_engine("smollm2-135m-instruct", objective=objective, plugins=plugins, **SETTINGS)
    assert engine.plan.parts["quantizer"].name == chosen


def test_a_dense_checkpoint_has_nothing_for_it(
    make_engine: Callable[..., Any], plugins: list[Any], tiny_path: Path
) -> None:
    engine = make_engine(tiny_path, objective="memory", plugins=plugins, **SETTINGS)
    assert engine.plan.parts["quantizer"].name == "none"


@pytest.mark.skipif(vectors.WIDTH != 16, reason="this CPU has no wider vectors than AVX2's")
@pytest.mark.parametrize("name", ["haswell", pytest.param("skylake-avx512", marks=pytest.mark.full)])
@pytest.mark.long
def test_cpus_without_products_of_four_bytes(name: str, tmp_path: Path) -> None:
    """AVX2, and AVX-512 without VNNI, which add pairs of products in 16 bits."""
    features = "+avx2,+fma,+avx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+bmi,+bmi2,+popcnt,+cx16,+lzcnt,+f16c,+64bit"
    if name != "haswell":
        features += ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"
    numba = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = ["product_of_the_rounded", "every_weight", "largest_numbers", "fuse", "broken"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", " or ".join(tests), __file__],
        env=os.environ | numba,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_log_is_quiet_where_all_is_served(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, spec, _ = stored("Q4_0")
    with caplog.at_level(logging.INFO, logger="pegboard"):
        quantizer().linear(spec, checkpoint, Shard())
    assert not caplog.records
