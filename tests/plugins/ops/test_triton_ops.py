"""TritonOps against TorchOps and float64: on a CUDA device, and on CPU under Triton's interpreter.

The interpreter is chosen when a kernel is defined, so it has a process of its own (`test_under_the_interpreter`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.device import DeviceFacts, TensorSpec
from pegboard.contracts.ops import Norm, OpsNeed, Rope
from pegboard.dtypes import dtype_name, torch_dtype
from pegboard.errors import PegboardError
from pegboard.ops import TorchOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RUNS = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
#: Sizes and counts that the interpreter takes long for and that are much like the others.
MORE = pytest.mark.full if INTERPRETED else ()
FLOATS = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
NEED = OpsNeed(
    device=DeviceFacts(type="cuda", capability=torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0)),
    dtype="float16",
    hidden_size=64,
    head_sizes=(16,),
    activations=("silu",),
)
torch_ops = TorchOps()


@pytest.fixture
def ops() -> Any:
    from pegboard_ops.triton_ops import TritonOps

    return TritonOps(NEED, interpreted=INTERPRETED)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def ulp(x: Tensor) -> Tensor:
    return torch.finfo(x.dtype).eps * x.float().abs().clamp(min=torch.finfo(x.dtype).tiny)


def assert_close(found: Tensor, right: Tensor, ulps: float = 1.01) -> None:
    """Within `ulps` units in the last place of the greater neighbours."""
    assert found.dtype == right.dtype
    assert found.shape == right.shape
    assert found.is_contiguous()
    off = (found.double() - right.double()).abs() / ulp(right).double()
    assert off.max() <= ulps, f"{off.max():.2f} units in the last place"


class DenseLinear:
    """The least that the Linear protocol asks for."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, partition: str | None = None) -> None:
        self.weight, self.bias, self.partition = weight, bias, partition
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes
        self.called = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.called += 1
        return functional.linear(x, self.weight, self.bias)


# ---- norm, gated, embed


@RUNS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 72), (1100, 24), (3, 4096)])
def test_norm(ops: Any, dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual = random(rows, size, dtype=dtype) * 3, random(rows, size, seed=2, dtype=dtype)
    llama = Norm(weight=random(size, seed=1, dtype=dtype), eps=1e-5)
    gemma = Norm(weight=random(size, seed=1, dtype=dtype), eps=1e-6, offset=1.0, round_first=False)
    for norm in (llama, gemma):
        right = torch_ops.norm(x, norm)
        # The sum of squares is added in another order: a rounding before the weight may fall the other way
        assert_close(ops.norm(x, norm), right, 4 if dtype == torch.float32 else 2.01)
        with_residual = ops.norm(x, norm, residual)
        bound = 3 * ulp(right).double() + ulp(residual + right).double()
        assert ((with_residual.double() - (residual + right).double()).abs() <= bound).all()


@RUNS
def test_norm_of_strided_rows_and_more_dimensions(ops: Any) -> None:
    x = random(4, 3, 96, dtype=torch.float32)[..., 8:72]
    norm = Norm(weight=random(64, seed=1, dtype=torch.float32), eps=1e-5)
    assert_close(ops.norm(x, norm), torch_ops.norm(x, norm), 4)


@RUNS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gated(ops: Any, activation: Any, dtype: torch.dtype) -> None:
    x = random(3, 2 * 1030, dtype=dtype) * 4
    right = torch_ops.gated(x, activation)
    # exp of float32 is good to two units; for large negative x that is all that is left of the result
    bound = 2.01 * ulp(right).double() + 4e-6 * x[:, 1030:].double().abs()
    assert ((ops.gated(x, activation).double() - right.double()).abs() <= bound).all()


@RUNS
def test_embed(ops: Any) -> None:
    table, ids = random(50, 1100), torch.tensor([3, 0, 49, 3], device=DEVICE)
    assert torch.equal(ops.embed(ids, table), torch_ops.embed(ids, table))


# ---- project


def exact(x: Tensor, linear: DenseLinear, norm: Norm | None, activation: str | None, residual: Tensor | None) -> Tensor:
    """In float64."""
    wide = x.double()
    if norm is not None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        wide = wide * scale * (norm.weight.double() + norm.offset)
    out = wide @ linear.weight.double().t()
    if linear.bias is not None:
        out = out + linear.bias.double()
    if activation is not None:
        gate, up = out.chunk(2, -1)
        act = {"silu": functional.silu, "gelu": functional.gelu}[activation]
        out = act(gate) * up
    return out if residual is None else out + residual.double()


@RUNS
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        *((6, inputs) for inputs in (64, 200, 1024, 1152, 3072)),
        *((34, inputs) for inputs in (64, 1152)),
        *(pytest.param(34, inputs, marks=MORE) for inputs in (200, 1024, 3072)),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_project(ops: Any, inputs: int, outputs: int, rows: int) -> None:
    x, linear = random(rows, inputs), DenseLinear(random(outputs, inputs, seed=1) * 0.1, random(outputs, seed=2))
    plain = DenseLinear(linear.weight)
    norm = Norm(weight=random(inputs, seed=3), eps=1e-5)
    gemma = Norm(weight=random(inputs, seed=3), eps=1e-6, offset=1.0, round_first=False)
    residual, half = random(rows, outputs, seed=4), random(rows, outputs // 2, seed=5)
    cases: list[tuple[DenseLinear, Norm | None, Any, Tensor | None]] = [
        (plain, None, None, None),
        (linear, norm, None, None),
        (plain, gemma, "silu", None),
        (linear, norm, "gelu", half),
        (plain, None, None, residual),
        (linear, None, None, residual),
    ]
    for case, before, activation, added in cases:
        found = ops.project(
            x, case, norm=before, activation=activation, residual=None if added is None else added.clone()
        )
        right = exact(x, case, before, activation, added)
        assert found.shape == right.shape
        assert (found.double() - right).norm() / right.norm() < (1e-3 if rows == 1 else 3e-3)
        assert rows > 1 or case.called == 0, "a lone row's product is fused"


@RUNS
@pytest.mark.parametrize(
    ("outputs", "inputs"), [pytest.param(1024, 1024, marks=MORE), (1100, 512), pytest.param(2056, 512, marks=MORE)]
)
@pytest.mark.parametrize("rows", [2, pytest.param(5, marks=MORE), 16])
def test_project_few_rows(ops: Any, outputs: int, inputs: int, rows: int) -> None:
    x, linear = random(rows, inputs), DenseLinear(random(outputs, inputs, seed=1) * 0.1, random(outputs, seed=2))
    plain = DenseLinear(linear.weight)
    norm = Norm(weight=random(inputs, seed=3), eps=1e-5)
    residual, half = random(rows, outputs, seed=4), random(rows, outputs // 2, seed=5)
    cases: list[tuple[DenseLinear, Norm | None, Any, Tensor | None]] = [
        (plain, norm, None, None),
        (linear, None, "silu", half),
        (linear, None, None, residual),
    ]
    for case, before, activation, added in cases:
        found = ops.project(
            x, case, norm=before, activation=activation, residual=None if added is None else added.clone()
        )
        right = exact(x, case, before, activation, added)
        assert found.shape == right.shape
        assert (found.double() - right).norm() / right.norm() < 1.5e-3
        assert case.called == (0 if ops._hopper else 1)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device: Gluon has no interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 1024), (518, 512), (1034, 3072), (2056, 1536), (4130, 1024)])
@pytest.mark.parametrize("rows", [3, 16, 24, 64])
def test_project_rows_whose_weights_are_held(
    dtype: torch.dtype, outputs: int, inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pegboard_ops.projecting_held import held_shape
    from pegboard_ops.triton_ops import TritonOps

    ops = TritonOps(msgspec.structs.replace(NEED, dtype=dtype_name(dtype)))
    if held_shape(rows, outputs, inputs) is None:
        assert rows == 64
        assert outputs > 2048
        return
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype) * inputs**-0.5
    linear, plain = DenseLinear(weight, random(outputs, seed=2, dtype=dtype)), DenseLinear(weight)
    norm = Norm(weight=random(inputs, seed=3, dtype=dtype), eps=1e-5)
    gemma = Norm(weight=random(inputs, seed=3, dtype=dtype), eps=1e-6, offset=1.0, round_first=False)
    residual = random(rows, outputs, seed=4, dtype=dtype)
    half = random(rows, outputs // 2, seed=5, dtype=dtype)
    cases: list[tuple[DenseLinear, Norm | None, Any, Tensor | None]] = [
        (plain, norm, None, None),
        (linear, gemma, None, residual),
        (plain, norm, "silu", None),
        (linear, None, "gelu", half),
        (plain, None, None, residual),
    ]
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    for case, before, activation, added in cases:
        arguments = {"norm": before, "activation": activation, "residual": added}
        right = exact(x, case, before, activation, added)
        reference = (torch_ops.project(x, case, **arguments).double() - right).norm() / right.norm()
        case.called = 0
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", lambda self, *size, **k: poisoned(size, dtype=self.dtype, device=DEVICE))
            found = ops.project(x, case, **arguments)
        assert case.called == 0
        assert (found.double() - right).norm() / right.norm() <= 1.1 * reference
        assert torch.equal(found, ops.project(x, case, **arguments)), "the same, bit for bit"


@RUNS
def test_a_partial_sum_is_left_to_its_linear(ops: Any) -> None:
    linear = DenseLinear(random(8, 64), partition="input")
    ops.project(random(1, 64), linear, residual=random(1, 8))
    assert linear.called == 1


@RUNS
@pytest.mark.parametrize("rows", [1, 5])
def test_a_packed_linear_adds_the_residual_itself(ops: Any, rows: int) -> None:
    class Packed(DenseLinear):
        added = 0

        def __init__(self, weight: Tensor) -> None:
            super().__init__(weight)
            self.hidden, self.weight = DenseLinear(weight), None

        def __call__(self, x: Tensor) -> Tensor:
            self.called += 1
            return self.hidden(x)

        def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
            self.added += 1
            return residual.add_(self.hidden(x))

    linear = Packed(random(6, 64, seed=1))
    x, residual, norm = random(rows, 64), random(rows, 6, seed=2), Norm(weight=random(64, seed=3), eps=1e-5)
    right = exact(x, linear.hidden, norm, None, residual)
    found = ops.project(x, linear, norm=norm, residual=residual)
    assert (linear.added, linear.called) == (1, 0)
    assert (found.double() - right).norm() / right.norm() < 3e-3
    ops.project(x, linear, activation="silu", residual=random(rows, 3))
    assert (linear.added, linear.called) == (1, 1), "not with an activation between them"


@RUNS
def test_batch_invariant_ops_fuse_nothing(ops: Any) -> None:
    from pegboard_ops.triton_ops import TritonOps

    invariant = TritonOps(msgspec.structs.replace(NEED, batch_invariant=True), interpreted=INTERPRETED)
    linear = DenseLinear(random(8, 64))
    invariant.project(random(1, 64), linear, residual=random(1, 8))
    assert linear.called == 1


# ---- rope_write


def make_cache(heads: int, size: int, dtype: str, page: int = 16, pages: int = 6, form: str = "nhd") -> LayerCache:
    if form == "nhd":
        specs = [TensorSpec(name=n, shape=(page, heads, size), dtype=dtype) for n in ("k", "v")]
    else:
        stored = "uint8" if form == "int8" else form
        specs = [
            TensorSpec(name="k", shape=(heads, page, size), dtype=stored),
            TensorSpec(name="v", shape=(heads, size, page), dtype=stored),
            TensorSpec(name="k_scale", shape=(heads, page), dtype="float32"),
            TensorSpec(name="v_scale", shape=(heads, page), dtype="float32"),
        ]
    layout = KVLayout(name="nhd" if form == "nhd" else f"hnd-{form}", tensors=tuple(specs))
    tensors = {s.name: torch.zeros((pages, *s.shape), dtype=torch_dtype(s.dtype), device=DEVICE) for s in specs}
    return LayerCache(layout=layout, group=0, page_size=page, tensors=tensors)


def make_rope(turning: int, interleaved: bool = False) -> Rope:
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(turning // 2) / (turning // 2))
    return Rope(cos=angle.cos().float().to(DEVICE), sin=angle.sin().float().to(DEVICE), interleaved=interleaved)


@RUNS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "turning", "interleaved"),
    [
        ((4, 2, 16), 16, False),
        ((9, 3, 40), 40, True),
        ((1, 1, 80), 32, False),
        ((5, 5, 24), 8, True),
        ((4, 1, 64), 0, False),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(
    ops: Any, dtype: torch.dtype, heads: tuple[int, int, int], turning: int, interleaved: bool, normed: bool
) -> None:
    h, k, d = heads
    qkv = random(5, (h + 2 * k) * d + 7, dtype=dtype)[:, 3:-4]  # rows further apart than they are long
    positions = torch.tensor([0, 63, 5, 6, 30], device=DEVICE)
    index = torch.tensor([17, 95, 0, 40, 41], device=DEVICE)
    rope = make_rope(turning, interleaved) if turning else None
    q_norm = Norm(weight=random(d, seed=1, dtype=dtype), eps=1e-5) if normed else None
    k_norm = Norm(weight=random(d, seed=2, dtype=dtype), eps=1e-6, offset=1.0, round_first=False) if normed else None
    ours, theirs = (make_cache(k, d, dtype_name(dtype)) for _ in range(2))
    assert ops.writes(ours.layout)
    args = (heads, positions, rope)
    q, kept_k, kept_v = ops.rope_write(qkv, *args, ours, index, q_norm, k_norm)
    right, _, _ = torch_ops.rope_write(qkv.contiguous(), *args, theirs, index, q_norm, k_norm)
    assert kept_k is None
    assert kept_v is None
    loose = dtype == torch.float32 or normed
    largest = qkv.abs().max().item() * (5 if normed else 1.5)
    bound = torch.finfo(dtype).eps * largest * (2 if loose else 1)  # of a sum's greatest term
    assert (q.double() - right.double()).abs().max() <= bound
    assert (ours.tensors["k"].double() - theirs.tensors["k"].double()).abs().max() <= bound
    assert torch.equal(ours.tensors["v"], theirs.tensors["v"])


@RUNS
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("tokens", [4, 300])
def test_quantized_write(ops: Any, form: str, tokens: int) -> None:
    """Of many tokens the values have a launch of their own; most follow each other in their page."""
    h, k, d, page = 4, 2, 24, 16
    sizes = torch.tensor([[1e-3], [1.0], [300.0], [0.0]], device=DEVICE).half().repeat(tokens // 4, 1)
    qkv = random(tokens, (h + 2 * k) * d) * sizes
    places = [17, 95, 3, 40] if tokens == 4 else [*range(20, 310), 7, 319, 11, 0, 1, 19, 315, 5, 2, 312]
    index = torch.tensor(places, device=DEVICE)
    cache = make_cache(k, d, "", page, pages=6 if tokens == 4 else 20, form=form)
    assert ops.writes(cache.layout)
    ops.rope_write(qkv, (h, k, d), torch.zeros(tokens, dtype=torch.int64, device=DEVICE), None, cache, index)
    inside, pages = index % page, index // page
    top = 127.0 if form == "int8" else 448.0
    for name, start in (("k", h), ("v", h + k)):
        right = qkv.view(tokens, -1, d)[:, start : start + k].double()
        held = cache.tensors[name]
        held = (held[pages, :, inside] if name == "k" else held[pages, :, :, inside]).double()
        scale = cache.tensors[f"{name}_scale"][pages, :, inside].double()
        assert ((scale - (right.abs().amax(-1) / top).clamp(min=2.0**-100)).abs() <= 1e-6 * scale).all()
        if form == "int8":
            assert ((held - 128) * scale[..., None] - right).abs().le(scale[..., None] * 0.5001).all()
        else:
            # a half of the last of four bits, or of the smallest step
            allowed = (right.abs() / 16 * 1.001).maximum(scale[..., None] * 2.0**-10 * 1.001)
            assert (held * scale[..., None] - right).abs().le(allowed).all()
    untouched = torch.ones(page * cache.tensors["k"].shape[0], dtype=torch.bool)
    untouched[index.cpu()] = False
    for name in ("k_scale", "v_scale"):
        assert not cache.tensors[name].transpose(1, 2).reshape(-1, k).cpu()[untouched].any()


@RUNS
@pytest.mark.parametrize("form", ["nhd", "int8", "float8_e4m3fn"])
def test_move_entries(ops: Any, form: str) -> None:
    cache = make_cache(2, 8, "float16", form=form)
    for seed, tensor in enumerate(cache.tensors.values()):
        tensor.copy_((random(*tensor.shape, seed=seed, dtype=torch.float32) * 40 + 128).clamp(0, 255).to(tensor.dtype))

    def entries(name: str, tensor: Tensor) -> Tensor:
        bytes_or_floats = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        if form == "nhd":
            return bytes_or_floats.reshape(96, -1).clone()
        turned = bytes_or_floats.transpose(2, 3) if name == "v" else bytes_or_floats
        return turned.transpose(1, 2).reshape(96, -1).clone()

    before = {name: entries(name, tensor) for name, tensor in cache.tensors.items()}
    source, target = torch.tensor([20, 21, 22], device=DEVICE), torch.tensor([19, 20, 80], device=DEVICE)
    ops.move_entries(cache, source, target)
    for name, tensor in cache.tensors.items():
        right = before[name].clone()
        right[target] = before[name][source]
        assert torch.equal(entries(name, tensor), right)


@RUNS
def test_wrong_width_is_refused(ops: Any) -> None:
    with pytest.raises(PegboardError, match="have 128"):
        ops.rope_write(random(1, 96), (4, 2, 16), torch.zeros(1), None, make_cache(2, 16, "float16"), torch.zeros(1))


def test_layouts_that_it_does_not_write() -> None:
    from pegboard_ops.rope_writing import can_write

    assert not can_write(KVLayout(name="hnd", tensors=make_cache(2, 16, "float16").layout.tensors))
    assert not can_write(make_cache(2, 16, "float64").layout)
    quantized = make_cache(2, 16, "", form="int8").layout
    assert can_write(quantized)
    assert not can_write(KVLayout(name=quantized.name, tensors=quantized.tensors[:2]))
    assert not can_write(KVLayout(name="hnd-float8_e4m3fn", tensors=quantized.tensors))


def test_refusals() -> None:
    from pegboard_ops.triton_ops import TritonOps

    def refused(**changes: Any) -> str:
        return "\n".join(TritonOps.refusals(msgspec.structs.replace(NEED, **changes), None))

    assert refused() == ""
    assert "compute capability 8.0 or more, not cpu" in refused(device=DeviceFacts(type="cpu"))
    assert "not in float64" in refused(dtype="float64")
    assert "at most 16384 numbers, not 20000" in refused(hidden_size=20000)
    assert "'relu'" in refused(activations=("relu",))


@pytest.mark.skipif(INTERPRETED, reason="is what runs it")
@pytest.mark.long
def test_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
