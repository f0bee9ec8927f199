"""TorchOps against transformers' modules and float64 formulas."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.device import DeviceFacts, TensorSpec
from pegboard.contracts.ops import Norm, OpsNeed, Rope
from pegboard.errors import PegboardError
from pegboard.ops import TorchOps

NEED = OpsNeed(device=DeviceFacts(type="cpu"), dtype="float32", hidden_size=48, head_sizes=(16,), activations=("silu",))
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = ["cpu", CUDA]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def ops() -> TorchOps:
    assert not TorchOps.refusals(NEED, None)
    return TorchOps.create(NEED, None)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class DenseLinear:
    """The least that the Linear protocol asks for."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.bias, self.partition = weight, None, None
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def layer_cache(
    pages: int = 5, size: int = 16, heads: int = 2, head_size: int = 16, dtype: str = "float32"
) -> LayerCache:
    shape = (size, heads, head_size)
    layout = KVLayout(name="nhd", tensors=tuple(TensorSpec(name=n, shape=shape, dtype=dtype) for n in ("k", "v")))
    tensors = {n: torch.full((pages, *shape), torch.nan, dtype=getattr(torch, dtype)) for n in ("k", "v")}
    return LayerCache(layout=layout, group=0, page_size=size, tensors=tensors)


# ---- norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_transformers_llama_norm(ops: TorchOps, dtype: torch.dtype) -> None:
    module = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    module.weight.data = random(48, seed=1, dtype=dtype)
    x = random(7, 48, dtype=dtype) * 3
    with torch.inference_mode():
        assert torch.equal(ops.norm(x, Norm(weight=module.weight.data, eps=1e-5)), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_transformers_gemma_norm(ops: TorchOps, dtype: torch.dtype) -> None:
    module = Gemma3RMSNorm(48, eps=1e-6).to(dtype)
    module.weight.data = random(48, seed=1, dtype=dtype)
    x = random(7, 3, 48, dtype=dtype)
    norm = Norm(weight=module.weight.data, eps=1e-6, offset=1.0, round_first=False)
    with torch.inference_mode():
        assert torch.equal(ops.norm(x, norm), module(x))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("round_first", [True, False])
def test_norm_in_float64(ops: TorchOps, offset: float, round_first: bool) -> None:
    x, weight = random(4, 48, dtype=torch.float64), random(48, seed=2, dtype=torch.float64)
    expected = torch.stack(
        [row / math.sqrt(math.fsum(v * v for v in row.tolist()) / 48 + 0.1) * (weight + offset) for row in x]
    )
    norm = Norm(weight=weight, eps=0.1, offset=offset, round_first=round_first)
    torch.testing.assert_close(ops.norm(x, norm), expected, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(ops.norm(x, norm, x), x + expected, atol=1e-14, rtol=1e-14)


def test_both_roundings_differ_in_half_precision(ops: TorchOps) -> None:
    x, weight = random(50, 48, dtype=torch.bfloat16), random(48, seed=2, dtype=torch.bfloat16)
    first, last = (ops.norm(x, Norm(weight=weight, eps=1e-5, round_first=flag)) for flag in (True, False))
    wide = ops.norm(x.double(), Norm(weight=weight.double(), eps=1e-5))
    assert torch.equal(last, wide.bfloat16())
    assert not torch.equal(first, last)


# ---- project, gated, embed


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu"])
def test_gated_activations(ops: TorchOps, name: str) -> None:
    x = random(5, 24, dtype=torch.float64)
    curve = {
        "silu": lambda g: g / (1 + math.exp(-g)),
        "gelu": lambda g: g * 0.5 * (1 + math.erf(g / math.sqrt(2))),
        "gelu_tanh": lambda g: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    }[name]
    expected = torch.tensor(
        [[curve(g) * u for g, u in zip(row[:12], row[12:], strict=True)] for row in x.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(ops.gated(x, name), expected, atol=1e-14, rtol=1e-12)  # type: ignore[arg-type]


def test_project_composes_its_parts(ops: TorchOps) -> None:
    x, weight, residual = (random(*shape, dtype=torch.float64) for shape in ((3, 48), (20, 48), (3, 10)))
    norm = Norm(weight=random(48, seed=3, dtype=torch.float64), eps=1e-5)
    linear = DenseLinear(weight)
    torch.testing.assert_close(ops.project(x, linear), x @ weight.T)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    wide = normed @ weight.T
    expected = residual + wide[:, :10] * wide[:, :10].sigmoid() * wide[:, 10:]
    out = ops.project(x, linear, norm=norm, activation="silu", residual=residual)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    plain = ops.project(x, linear, residual=random(3, 20, seed=9, dtype=torch.float64))
    torch.testing.assert_close(plain, x @ weight.T + random(3, 20, seed=9, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_embed(ops: TorchOps) -> None:
    weight = random(9, 4)
    assert torch.equal(ops.embed(torch.tensor([8, 0, 8]), weight), torch.stack([weight[8], weight[0], weight[8]]))


# ---- rope and the cache


def tables(size: int, length: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(0, size, 2).double() / size)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rope_write_turns_like_transformers_and_fills_the_cache(ops: TorchOps, dtype: torch.dtype) -> None:
    qkv = random(6, (3 + 2 * 2) * 16, dtype=dtype)
    before = qkv.clone()
    cos, sin = tables(16, dtype=torch.promote_types(dtype, torch.float32))
    positions, index = torch.tensor([0, 5, 5, 63, 1, 2]), torch.tensor([16, 79, 3, 31, 40, 64])
    cache = layer_cache(dtype=str(dtype).removeprefix("torch."))
    q, k, v = ops.rope_write(qkv, (3, 2, 16), positions, Rope(cos=cos, sin=sin), cache, index)
    heads = qkv.view(6, 7, 16).transpose(0, 1)[None].to(cos.dtype)
    full = [torch.cat([t, t], dim=-1)[positions][None] for t in (cos, sin)]
    turned = [x[0].transpose(0, 1).to(dtype) for x in apply_rotary_pos_emb(heads[:, :3], heads[:, 3:5], *full)]
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 1e-2)
    for found, expected in zip((q, k), turned, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert v is not None
    assert k is not None
    assert torch.equal(v, before.view(6, 7, 16)[:, 5:])
    assert torch.equal(qkv, before)
    for name, kept in (("k", k), ("v", v)):
        entries = cache.tensors[name].view(80, 2, 16)
        assert torch.equal(entries[index], kept)
        untouched = torch.ones(80, dtype=torch.bool)
        untouched[index] = False
        assert entries[untouched].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 8, 4])
def test_partial_and_interleaved_rotation(ops: TorchOps, interleaved: bool, rotary: int) -> None:
    """Against complex numbers, pair by pair."""
    qkv = random(5, 4 * 16, dtype=torch.float64)
    cos, sin = tables(rotary, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 30, 63])
    rope = Rope(cos=cos, sin=sin, interleaved=interleaved)
    cache = layer_cache(heads=1, dtype="float64")
    q, k, _ = ops.rope_write(qkv, (2, 1, 16), positions, rope, cache, torch.arange(5))
    assert k is not None
    found, source = torch.cat([q, k], dim=1), qkv.view(5, 4, 16)
    for token, position in enumerate(positions.tolist()):
        for head in range(3):
            expected = source[token, head].tolist()
            for i in range(rotary // 2):
                one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary // 2)
                z = complex(expected[one], expected[two]) * complex(float(cos[position, i]), float(sin[position, i]))
                expected[one], expected[two] = z.real, z.imag
            assert found[token, head].tolist() == pytest.approx(expected, abs=1e-14)


def test_query_and_key_norms_come_before_the_rotation(ops: TorchOps) -> None:
    qkv = random(4, 4 * 16)
    q_norm, k_norm = Norm(weight=random(16, seed=5), eps=1e-6), Norm(weight=random(16, seed=6), eps=1e-6)
    cos, sin = tables(16)
    rope, positions = Rope(cos=cos, sin=sin), torch.tensor([3, 1, 4, 1])
    source = qkv.view(4, 4, 16)
    full = [torch.cat([t, t], dim=-1)[positions] for t in (cos, sin)]
    for norms in ((q_norm, k_norm), (q_norm, None), (None, k_norm)):
        parts = []
        for x, norm in zip((source[:, :2], source[:, 2:3]), norms, strict=True):
            if norm is not None:
                module = LlamaRMSNorm(16, eps=1e-6)
                module.weight.data = norm.weight
                x = module(x)
            parts.append(x)
        expected = apply_rotary_pos_emb(*parts, *full, unsqueeze_dim=1)
        with torch.inference_mode():
            found = ops.rope_write(
                qkv, (2, 1, 16), positions, rope, layer_cache(heads=1), torch.arange(4), norms[0], norms[1]
            )
        for one, other in zip(found[:2], expected, strict=True):
            torch.testing.assert_close(one, other.detach(), atol=1e-6, rtol=1e-6)


def test_without_rope_nothing_turns(ops: TorchOps) -> None:
    qkv, cache = random(4, 4 * 16), layer_cache(heads=1)
    q, k, v = ops.rope_write(qkv, (2, 1, 16), torch.arange(4), None, cache, torch.arange(4))
    assert k is not None
    assert v is not None
    assert torch.equal(torch.cat([q, k, v], dim=1), qkv.view(4, 4, 16))
    assert torch.equal(cache.tensors["k"].view(80, 1, 16)[:4], k)


def test_a_narrower_cache_is_rounded_to(ops: TorchOps) -> None:
    cache = layer_cache(heads=1, dtype="bfloat16")
    _, k, _ = ops.rope_write(random(4, 64), (2, 1, 16), torch.arange(4), None, cache, torch.arange(4))
    assert k is not None
    assert torch.equal(cache.tensors["k"].view(80, 1, 16)[:4], k.bfloat16())


def test_wrong_heads_are_named(ops: TorchOps) -> None:
    with pytest.raises(PegboardError, match="63 features"):
        ops.rope_write(random(4, 63), (2, 1, 16), torch.arange(4), None, layer_cache(), torch.arange(4))


def test_writes_only_plain_keys_and_values(ops: TorchOps) -> None:
    good = layer_cache().layout
    k, v = good.tensors
    assert ops.writes(good)
    for tensors in (
        (k,),
        (k, v, TensorSpec(name="k_scale", shape=(16, 2), dtype="float32")),
        (k, msgspec.structs.replace(v, dtype="int8")),
        (k, msgspec.structs.replace(v, shape=(16, 32))),
        (v, k),
    ):
        assert not ops.writes(KVLayout(name="nhd", tensors=tensors))
    assert not ops.writes(KVLayout(name="hnd", tensors=good.tensors))


def test_copy_pages_and_move_entries(ops: TorchOps) -> None:
    cache = layer_cache(pages=4)
    for tensor in cache.tensors.values():
        tensor.copy_(random(*tensor.shape))
    extra = {**cache.tensors, "k_scale": random(4, 16, 2)}
    cache = msgspec.structs.replace(cache, tensors=extra)
    before = {name: tensor.clone() for name, tensor in extra.items()}
    ops.copy_pages(cache, torch.tensor([3, 0]), torch.tensor([1, 2]))
    for name, tensor in extra.items():
        assert torch.equal(tensor, before[name][[0, 3, 0, 3]])
    before = {name: tensor.flatten(0, 1).clone() for name, tensor in extra.items()}
    source, target = torch.tensor([5, 6, 40, 7]), torch.tensor([4, 5, 6, 63])  # overlap
    ops.move_entries(cache, source, target)
    for name, tensor in extra.items():
        expected = before[name].clone()
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            expected[other] = before[name][one]
        assert torch.equal(tensor.flatten(0, 1), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8], ids=str)
def test_pages_and_entries_of_bytes(ops: TorchOps, device: str, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 120, (4, 16, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cache = LayerCache(
        layout=KVLayout(name="odd", tensors=()), group=0, page_size=16, tensors={"k": codes.view(dtype).to(device)}
    )
    index = [torch.tensor(ids, device=device) for ids in ([3, 0], [1, 2], [5, 6], [4, 63])]
    ops.copy_pages(cache, *index[:2])
    right = codes[[0, 3, 0, 3]]
    assert torch.equal(cache.tensors["k"].view(torch.uint8).cpu(), right)
    ops.move_entries(cache, *index[2:])
    moved = right.flatten(0, 1).clone()
    moved[[4, 63]] = right.flatten(0, 1)[[5, 6]]
    assert torch.equal(cache.tensors["k"].view(torch.uint8).cpu().flatten(0, 1), moved)


def test_entries_that_do_not_come_first_are_not_moved(ops: TorchOps) -> None:
    cache = LayerCache(
        layout=KVLayout(name="odd", tensors=()), group=0, page_size=16, tensors={"k": random(4, 2, 16, 8)}
    )
    with pytest.raises(PegboardError, match="must come first"):
        ops.move_entries(cache, torch.tensor([1]), torch.tensor([2]))


def test_refusals_list_what_there_is() -> None:
    reasons = TorchOps.refusals(msgspec.structs.replace(NEED, dtype="int8", activations=("relu2", "silu")), None)
    assert len(reasons) == 2
    assert "int8" in reasons[0]
    assert "'relu2'" in reasons[1]
    assert "gelu_tanh" in reasons[1]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_the_device(ops: TorchOps, device: str) -> None:
    qkv, cache = random(6, 4 * 16), layer_cache(heads=1)
    on_device = msgspec.structs.replace(cache, tensors={n: t.to(device) for n, t in cache.tensors.items()})
    cos, sin = tables(16)
    norm = Norm(weight=random(16, seed=5), eps=1e-6)
    here = ops.rope_write(qkv, (2, 1, 16), torch.arange(6), Rope(cos=cos, sin=sin), cache, torch.arange(6), norm, norm)
    there = ops.rope_write(
        qkv.to(device),
        (2, 1, 16),
        torch.arange(6, device=device),
        Rope(cos=cos.to(device), sin=sin.to(device)),
        on_device,
        torch.arange(6, device=device),
        *[Norm(weight=norm.weight.to(device), eps=1e-6)] * 2,
    )
    for one, other in zip(here, there, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other.cpu(), atol=1e-5, rtol=1e-5)
