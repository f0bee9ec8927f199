"""DenseQuantizer over an in-memory checkpoint: fusing, converting, sharding, refusing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.errors import CheckpointError, ConfigError
from pegboard_quant.dense import DenseQuantizer
from pegboard_quant.linears import DenseLinear, PackedLinear
from pegboard_quant.options import DenseOptions


class MemoryCheckpoint(Checkpoint):
    """Tensors in memory; a read without conversion is a view, as of a mapped file."""

    def __init__(self, stored: dict[str, Tensor]) -> None:
        self.stored = stored

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, path: Path) -> Self:
        raise NotImplementedError

    @property
    def config(self) -> Mapping[str, Any]:
        return {}

    @property
    def generation(self) -> Mapping[str, Any]:
        return {}

    @property
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles()

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(name=name, shape=tuple(t.shape), storage=str(t.dtype)[6:], nbytes=t.nbytes)
            for name, t in self.stored.items()
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
        tensor = self.stored[name]
        part = tensor.narrow(dim, start, tensor.shape[dim] - start if length is None else length)
        return part.to(device, getattr(torch, dtype) if dtype else None)

    def close(self) -> None: ...


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


QKV = LinearSpec(
    name="qkv_proj",
    sources=("q_proj", "k_proj", "v_proj"),
    in_features=12,
    out_features=(16, 8, 8),
    bias=True,
    partition="output",
    unit=4,
)
DOWN = LinearSpec(
    name="down_proj", sources=("down_proj",), in_features=12, out_features=(10,), bias=True, partition="input"
)


@pytest.fixture
def checkpoint() -> MemoryCheckpoint:
    shapes = {"q_proj": (16, 12), "k_proj": (8, 12), "v_proj": (8, 12), "down_proj": (10, 12)}
    stored = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        stored[f"{name}.weight"] = random(*shape, seed=seed)
        stored[f"{name}.bias"] = random(shape[0], seed=seed + 50)
    return MemoryCheckpoint(stored)


def quantizer(dtype: str = "float64", **options: bool) -> DenseQuantizer:
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype=dtype)
    assert not DenseQuantizer.refusals(need, DenseOptions())
    return DenseQuantizer.create(need, DenseOptions(**options))


def test_sources_are_fused_in_order(checkpoint: MemoryCheckpoint) -> None:
    linear = quantizer().linear(QKV, checkpoint, Shard())
    x = random(5, 12, seed=9)
    expected = torch.cat(
        [x @ checkpoint.stored[f"{s}.weight"].T + checkpoint.stored[f"{s}.bias"] for s in QKV.sources], dim=1
    )
    torch.testing.assert_close(linear(x), expected)
    assert (linear.in_features, linear.out_features, linear.partition) == (12, 32, None)
    assert linear.weight_bytes == (32 * 12 + 32) * 8 == quantizer().bytes_for(QKV, checkpoint.tensors(), Shard())


@pytest.mark.parametrize(
    ("places", "shared"),
    [
        (((0, 20), (20, 26), (26, 32)), True),
        (((6, 26), (0, 6), (26, 32)), False),
        (((0, 20), (21, 27), (27, 33)), False),
    ],
    ids=["one behind the other", "another order", "a gap"],
)
def test_sources_that_lie_one_behind_the_other_stay_a_view_of_the_file(
    places: tuple[tuple[int, int], ...], shared: bool
) -> None:
    file = random(40, 12, seed=1)
    stored = {f"{name}.weight": file[slice(*place)] for name, place in zip("abc", places, strict=True)}
    spec = LinearSpec(name="abc", sources=tuple("abc"), in_features=12, out_features=(20, 6, 6))
    linear = quantizer().linear(spec, MemoryCheckpoint(stored), Shard())
    assert linear.weight is not None
    assert torch.equal(linear.weight, torch.cat(list(stored.values())))
    assert (linear.weight.untyped_storage().data_ptr() == file.untyped_storage().data_ptr()) is shared


def test_columns_of_a_file_are_not_taken_for_its_rows() -> None:
    file = random(4, 12, seed=1)
    stored = {"a.weight": file[:2, :6], "b.weight": file[1:3, :6]}
    spec = LinearSpec(name="ab", sources=("a", "b"), in_features=6, out_features=(2, 2))
    linear = quantizer().linear(spec, MemoryCheckpoint(stored), Shard())
    assert torch.equal(linear.weight, torch.cat(list(stored.values())))


def test_a_single_source_stays_a_view_of_the_file(checkpoint: MemoryCheckpoint) -> None:
    linear = quantizer().linear(DOWN, checkpoint, Shard())
    assert linear.weight is not None
    assert linear.weight.data_ptr() == checkpoint.stored["down_proj.weight"].data_ptr()


def test_conversion_to_the_compute_dtype(checkpoint: MemoryCheckpoint) -> None:
    linear = quantizer("bfloat16").linear(DOWN, checkpoint, Shard())
    assert linear.weight is not None
    assert torch.equal(linear.weight, checkpoint.stored["down_proj.weight"].bfloat16())
    assert linear(torch.ones(2, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert linear.weight_bytes == quantizer("bfloat16").bytes_for(DOWN, checkpoint.tensors(), Shard()) == (120 + 10) * 2


def test_output_shards_keep_heads_whole(checkpoint: MemoryCheckpoint) -> None:
    x = random(5, 12, seed=9)
    whole = quantizer().linear(QKV, checkpoint, Shard())(x).split(QKV.out_features, dim=1)
    for rank in range(2):
        shard = Shard(rank=rank, size=2)
        linear = quantizer().linear(QKV, checkpoint, shard)
        expected = torch.cat([part.chunk(2, dim=1)[rank] for part in whole], dim=1)
        torch.testing.assert_close(linear(x), expected)
        assert linear.partition == "output"
        assert linear.weight_bytes == quantizer().bytes_for(QKV, checkpoint.tensors(), shard)


def test_input_shards_sum_to_the_whole_with_one_bias(checkpoint: MemoryCheckpoint) -> None:
    x = random(5, 12, seed=9)
    partial: list[Tensor] = []

    def keep(part: Tensor) -> Tensor:
        partial.append(part.clone())
        return sum(partial[1:], start=partial[0])

    for rank in range(3):
        shard = Shard(rank=rank, size=3, all_reduce=keep)
        linear = quantizer().linear(DOWN, checkpoint, shard)
        out = linear(x[:, rank * 4 : rank * 4 + 4])
        assert linear.partition == "input"
        assert linear.weight_bytes == quantizer().bytes_for(DOWN, checkpoint.tensors(), shard) == (10 * 4 + 10) * 8
    torch.testing.assert_close(out, quantizer().linear(DOWN, checkpoint, Shard())(x))


def test_an_unsplit_linear_is_whole_on_every_rank(checkpoint: MemoryCheckpoint) -> None:
    spec = LinearSpec(name="down_proj", sources=("down_proj",), in_features=12, out_features=(10,))
    shard = Shard(rank=1, size=2, all_reduce=lambda x: x * 2)
    linear = quantizer().linear(spec, checkpoint, shard)
    x = random(2, 12, seed=3)
    torch.testing.assert_close(linear(x), x @ checkpoint.stored["down_proj.weight"].T)
    assert linear.partition is None
    assert linear.weight_bytes == quantizer().bytes_for(spec, checkpoint.tensors(), shard) == 10 * 12 * 8


def test_every_missing_and_wrong_tensor_is_named(checkpoint: MemoryCheckpoint) -> None:
    del checkpoint.stored["k_proj.bias"]
    checkpoint.stored["v_proj.weight"] = torch.zeros(8, 13)
    with pytest.raises(CheckpointError) as error:
        quantizer().linear(QKV, checkpoint, Shard())
    assert "k_proj.bias (8,) is missing" in str(error.value)
    assert "v_proj.weight has shape (8, 13), expected (8, 12)" in str(error.value)


def test_what_cannot_be_split_is_refused(checkpoint: MemoryCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"k_proj: 8 features in units of 4 .* over 4 ranks"):
        quantizer().linear(QKV, checkpoint, Shard(rank=0, size=4))
    with pytest.raises(ConfigError, match="12 features"):
        quantizer().bytes_for(DOWN, checkpoint.tensors(), Shard(rank=0, size=5))
    with pytest.raises(ConfigError, match="all_reduce"):
        quantizer().linear(DOWN, checkpoint, Shard(rank=0, size=2))


def test_tensor_names(checkpoint: MemoryCheckpoint) -> None:
    names = checkpoint.tensors()
    assert set(quantizer().tensor_names(QKV, names)) == {f"{s}.{x}" for s in QKV.sources for x in ("weight", "bias")}
    # What is missing is named, too: the model reports it.
    assert set(quantizer().tensor_names(QKV, {"q_proj.weight": None})) == set(quantizer().tensor_names(QKV, names))


def test_refusals() -> None:
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype="int8", scheme={"quant_method": "awq"})
    reasons = DenseQuantizer.refusals(need, DenseOptions())
    assert len(reasons) == 2
    assert "int8" in reasons[0]
    assert "'awq'" in reasons[1]


# -- float32 on the CPU


@pytest.mark.parametrize("rows", [0, 1, 8, 130])
@pytest.mark.parametrize("spec", [QKV, DOWN], ids=["fused", "single"])
def test_packed_is_within_float32_rounding(checkpoint: MemoryCheckpoint, spec: LinearSpec, rows: int) -> None:
    linear = quantizer("float32").linear(spec, checkpoint, Shard())
    assert isinstance(linear, PackedLinear)
    x = random(rows, 12, seed=9)
    exact = quantizer().linear(spec, checkpoint, Shard())(x)
    torch.testing.assert_close(linear(x.float()).double(), exact, rtol=1e-5, atol=1e-5)


def test_packed_is_as_exact_as_plain_at_the_size_of_a_model() -> None:
    spec = LinearSpec(name="down", sources=("down",), in_features=1536, out_features=(576,))
    stored = MemoryCheckpoint({"down.weight": random(576, 1536, seed=1)})
    for rows in (1, 8, 32):
        x = random(rows, 1536, seed=rows).float()
        packed, plain = (quantizer("float32", pack=p).linear(spec, stored, Shard()) for p in (True, False))
        exact = x.double() @ stored.stored["down.weight"].float().double().T
        errors = [(linear(x).double() - exact).norm().item() for linear in (packed, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * exact.norm().item()


def test_packed_input_shards_sum_to_the_whole(checkpoint: MemoryCheckpoint) -> None:
    partial: list[Tensor] = []

    def keep(part: Tensor) -> Tensor:
        partial.append(part.clone())
        return sum(partial[1:], start=partial[0])

    x = random(5, 12, seed=9)
    for rank in range(2):
        linear = quantizer("float32").linear(DOWN, checkpoint, Shard(rank=rank, size=2, all_reduce=keep))
        out = linear(x[:, rank * 6 : rank * 6 + 6].float())
    torch.testing.assert_close(out.double(), quantizer().linear(DOWN, checkpoint, Shard())(x), rtol=1e-5, atol=1e-5)


def test_packing_keeps_the_plain_weight_as_a_view(checkpoint: MemoryCheckpoint) -> None:
    """Two rows are computed from it, and it is the embedding's table where they are tied."""
    stored = checkpoint.stored["down_proj.weight"] = checkpoint.stored["down_proj.weight"].float()
    linear = quantizer("float32").linear(DOWN, checkpoint, Shard())
    assert isinstance(linear, PackedLinear)
    assert linear.weight is not None
    assert linear.weight.data_ptr() == stored.data_ptr()
    assert linear.weight_bytes == quantizer("float32").bytes_for(DOWN, checkpoint.tensors(), Shard()) == (240 + 10) * 4


@pytest.mark.parametrize("features", [1, 15, 16, 33, 96])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_and_any_number_of_features(features: int, rows: int, bias: bool) -> None:
    """Products of few rows are split into blocks of features: none may be left out, none be counted twice."""
    spec = LinearSpec(name="x", sources=("x",), in_features=24, out_features=(features,), bias=bias)
    stored = MemoryCheckpoint({"x.weight": random(features, 24, seed=1), "x.bias": random(features, seed=2)})
    x = random(rows, 24, seed=3)
    exact = x @ stored.stored["x.weight"].T + (stored.stored["x.bias"] if bias else 0)
    for pack in (True, False):
        linear = quantizer("float32", pack=pack).linear(spec, stored, Shard())
        for given in (x.float(), x.float().T.contiguous().T):
            out = linear(given)
            assert out.is_contiguous()
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_plain(checkpoint: MemoryCheckpoint) -> None:
    for made in (quantizer("float64"), quantizer("bfloat16"), quantizer("float32", pack=False)):
        linear = made.linear(DOWN, checkpoint, Shard())
        assert type(linear) is DenseLinear
        assert linear.weight is not None


def test_a_tied_head_lends_its_plain_weight() -> None:
    spec = LinearSpec(name="lm_head", sources=("embed",), in_features=8, out_features=(20,), tied=True)
    stored = MemoryCheckpoint({"embed.weight": random(20, 8, seed=0).float()}).tensors()
    assert quantizer("float32").bytes_for(spec, stored, Shard()) == 2 * 20 * 8 * 4
    assert quantizer("float32", pack=False).bytes_for(spec, stored, Shard()) == 20 * 8 * 4
    assert quantizer("float64").bytes_for(spec, stored, Shard()) == 20 * 8 * 8
