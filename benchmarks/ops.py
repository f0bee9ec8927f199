"""Ops in Triton beside torch's own and cuBLAS, bfloat16.

    python benchmarks/ops.py

Every work rotates over buffers so that the L2 is cold. `of ceiling`: the bytes that the work must move over its time,
as a share of the streaming-read ceiling for products, of a copy measured in the same run for the rest. A `chain` is a
decoder layer's four products with their norms, activation and residuals in one graph: only there dependent launch
shows. `cublas us`: the same, our norms and activations around cuBLAS's products. Errors are against float64 for
products, else against torch's ops: a few roundings of bfloat16 (4e-3) are as good as it gets. `compiled`: the
reference through torch.compile, for large shapes only, since each takes seconds to compile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import READ_CEILING, Call, copies_for, microseconds, print_table, relative_error, write_results
from torch import Tensor
from torch.nn import functional

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.device import DeviceFacts, TensorSpec
from pegboard.contracts.ops import Activation, Norm, OpsNeed, Rope
from pegboard.contracts.quantizer import Linear
from pegboard.ops import TorchOps
from pegboard_ops.triton_ops import TritonOps

#: (outputs, inputs) of products, those of MODELS and their heads
PRODUCTS = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (151936, 1024),
)
ROWS = (1, 2, 4, 8, 16, 32, 64)
#: name -> (hidden, query heads, KV heads, intermediate)
MODELS = {"8B": (4096, 32, 8, 14336), "0.6B": (1024, 16, 8, 3072)}


class DenseLinear:
    def __init__(self, outputs: int, inputs: int) -> None:
        self.weight = random(outputs, inputs, scale=inputs**-0.5)
        self.bias, self.partition = None, None
        self.out_features, self.in_features, self.weight_bytes = outputs, inputs, self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight.t())


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale


def make_ops(kind: type[TritonOps] = TritonOps) -> tuple[TritonOps, TorchOps]:
    device = DeviceFacts(type="cuda", capability=torch.cuda.get_device_capability())
    need = OpsNeed(device=device, dtype="bfloat16", hidden_size=4096, head_sizes=(128,), activations=("silu",))
    return kind.create(need, None), TorchOps.create(need, None)


class Parts(TritonOps):
    """A launch for each part: our norms and activations around cuBLAS."""

    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = linear(x if norm is None else self.norm(x, norm))
        if activation is not None:
            out = self.gated(out, activation)
        return out if residual is None else residual + out


def products(ours: TritonOps, shapes: Sequence[tuple[int, int]] = PRODUCTS) -> list[dict[str, Any]]:
    rows = []
    for outputs, inputs in shapes:
        size = outputs * inputs * 2
        linears = [DenseLinear(outputs, inputs) for _ in range(copies_for(size * 3 // 2))]
        for tokens in ROWS:
            x = random(tokens, inputs)
            right = x.double() @ linears[-1].weight.double().t()
            time = microseconds([partial(ours.project, x, linear) for linear in linears])
            rows.append(
                {
                    "op": "project",
                    "shape": f"{tokens} x {inputs} -> {outputs}",
                    "us": time,
                    "of ceiling": f"{size / time / 1e3 / READ_CEILING:.0%}",
                    "error": relative_error(ours.project(x, linears[-1]), right),
                    "cublas us": microseconds([partial(linear, x) for linear in linears]),
                    "cublas error": relative_error(linears[-1](x), right),
                }
            )
    return rows


def chain(ops: TorchOps, layer: list[DenseLinear], x: Tensor, mixed: Tensor, norms: list[Norm]) -> Tensor:
    qkv, o, gate_up, down = layer
    ops.project(x, qkv, norm=norms[0])
    middle = ops.project(mixed, o, residual=x)
    active = ops.project(middle, gate_up, norm=norms[1], activation="silu")
    return ops.project(active, down, residual=middle)


def chains(ours: TritonOps, torchs: TorchOps, names: Sequence[str] = tuple(MODELS)) -> list[dict[str, Any]]:
    rows = []
    parts = make_ops(Parts)[0]
    for name in names:
        hidden, heads, kv_heads, inner = MODELS[name]
        shapes = [((heads + 2 * kv_heads) * 128, hidden), (hidden, heads * 128), (2 * inner, hidden), (hidden, inner)]
        size = sum(o * i for o, i in shapes) * 2
        layers = [[DenseLinear(*shape) for shape in shapes] for _ in range(copies_for(size))]
        norms = [Norm(weight=random(hidden), eps=1e-5) for _ in range(2)]
        for tokens in ROWS:
            given = (random(tokens, hidden), random(tokens, heads * 128), norms)
            time = microseconds([partial(chain, ours, layer, *given) for layer in layers])
            rows.append(
                {
                    "op": "chain",
                    "shape": f"{tokens}, {name}",
                    "us": time,
                    "of ceiling": f"{size / time / 1e3 / READ_CEILING:.0%}",
                    "error": relative_error(chain(ours, layers[0], *given), chain(torchs, layers[0], *given)),
                    "cublas us": microseconds([partial(chain, parts, layer, *given) for layer in layers]),
                    "torch us": microseconds([partial(chain, torchs, layer, *given) for layer in layers]),
                }
            )
    return rows


def measured(op: str, shape: str, size: int, copy: float, error: float, *calls: list[Call]) -> dict[str, Any]:
    """`calls`: ours, then torch's, then perhaps those through torch.compile"""
    time = microseconds(calls[0])
    row = {
        "op": op,
        "shape": shape,
        "us": time,
        "of ceiling": f"{size / time / 1e3 / copy:.0%}",
        "error": error,
        "torch us": microseconds(calls[1]),
    }
    return row | ({"compiled us": microseconds(calls[2])} if len(calls) > 2 else {})


def compiled_norm(norm: Norm) -> Callable[..., Tensor]:
    weight, eps = norm.weight, norm.eps

    def plain(x: Tensor, residual: Tensor) -> Tensor:
        return residual + functional.rms_norm(x, weight.shape, weight, eps)

    fused = torch.compile(plain, dynamic=False, fullgraph=True)
    return lambda x, norm, residual: fused(x, residual)


def compiled_gated() -> Callable[..., Tensor]:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    fused = torch.compile(plain, dynamic=False, fullgraph=True)
    return lambda x, activation: fused(x)


def elementwise(ours: TritonOps, torchs: TorchOps, copy: float) -> list[dict[str, Any]]:
    rows = []
    for hidden in (1024, 4096):
        norm = Norm(weight=random(hidden), eps=1e-5)
        for tokens in (1, 64, 2048, 32768 * 1024 // hidden):
            size = tokens * hidden * 6
            pairs = [(random(tokens, hidden), random(tokens, hidden)) for _ in range(copies_for(size))]
            functions = [ours.norm, torchs.norm]
            if tokens > 2048:
                functions.append(compiled_norm(norm))
            calls = [[partial(function, x, norm, residual) for x, residual in pairs] for function in functions]
            error = relative_error(calls[0][0](), calls[1][0]())
            rows.append(measured("norm + add", f"{tokens} x {hidden}", size, copy, error, *calls))
    for width in (2 * 3072, 2 * 14336):
        for tokens in (1, 64, 8192 if width < 10000 else 2048):
            size = tokens * width * 3
            xs = [random(tokens, width) for _ in range(copies_for(size))]
            functions = [ours.gated, torchs.gated]
            if tokens >= 2048:
                functions.append(compiled_gated())
            calls = [[partial(function, x, "silu") for x in xs] for function in functions]
            error = relative_error(calls[0][0](), calls[1][0]())
            rows.append(measured("gated", f"{tokens} x {width}", size, copy, error, *calls))
    table = random(128256, 4096)
    for tokens in (1, 64, 8192):
        ids = [torch.randint(0, 128256, (tokens,), device="cuda") for _ in range(16)]
        calls = [[partial(o.embed, i, table) for i in ids] for o in (ours, torchs)]
        error = relative_error(calls[0][0](), calls[1][0]())
        rows.append(measured("embed", f"{tokens} x 4096", tokens * 4096 * 4, copy, error, *calls))
    return rows


def make_cache(heads: int, size: int, page: int, pages: int, form: str) -> LayerCache:
    shapes = {"k": (page, heads, size), "v": (page, heads, size)}
    dtypes = dict.fromkeys(shapes, "bfloat16")
    if form != "nhd":
        shapes = {
            "k": (heads, page, size),
            "v": (heads, size, page),
            "k_scale": (heads, page),
            "v_scale": (heads, page),
        }
        dtypes = {"k": "uint8", "v": "uint8", "k_scale": "float32", "v_scale": "float32"}
    specs = tuple(TensorSpec(name=name, shape=shape, dtype=dtypes[name]) for name, shape in shapes.items())
    tensors = {
        spec.name: torch.zeros((pages, *spec.shape), dtype=getattr(torch, spec.dtype), device="cuda") for spec in specs
    }
    return LayerCache(layout=KVLayout(name=form, tensors=specs), group=0, page_size=page, tensors=tensors)


def prompt_entries(tokens: int, pages: int = 4096, page: int = 64) -> Tensor:
    """Where tokens are written: a prompt from the middle of a page on, or a token each of many rows."""
    if tokens <= 64:
        return torch.randperm(pages * page, device="cuda")[:tokens]
    entry = torch.arange(5, 5 + tokens, device="cuda")
    return torch.randperm(pages, device="cuda")[entry // page] * page + entry % page


def rope_writes(ours: TritonOps, torchs: TorchOps, copy: float) -> list[dict[str, Any]]:
    """torch's writes plain pages also where ours quantizes."""
    rows = []
    angle = torch.arange(8192, device="cuda")[:, None] * 500000.0 ** (-torch.arange(64, device="cuda") / 64)
    rope = Rope(cos=angle.cos(), sin=angle.sin())
    norm = Norm(weight=random(128), eps=1e-6)
    heads = (32, 8, 128)
    for form, norms in (("nhd", (None, None)), ("nhd", (norm, norm)), ("hnd-int8", (norm, norm))):
        for tokens in (1, 64, 8192):
            qkvs = [random(tokens, 48 * 128) for _ in range(copies_for(tokens * 48 * 128 * 4))]
            positions = torch.randint(0, 8192, (tokens,), device="cuda")
            calls: list[list[Call]] = []
            for ops, kind in ((ours, form), (torchs, "nhd")):
                cache = make_cache(8, 128, 64, 4096, kind)
                index = [prompt_entries(tokens) for _ in qkvs]
                calls.append(
                    [
                        partial(ops.rope_write, qkv, heads, positions, rope, cache, at, *norms)
                        for qkv, at in zip(qkvs, index, strict=True)
                    ]
                )
            size = tokens * 128 * 2 * (48 + 32) + tokens * 16 * (256 if form == "nhd" else 132)
            name = f"rope write{' + norms' if norms[0] else ''}{'' if form == 'nhd' else ', int8'}"
            error = relative_error(calls[0][0]()[0], calls[1][0]()[0])
            rows.append(measured(name, f"{tokens} x 32 + 2 x 8 heads", size, copy, error, *calls))
    return rows


def copy_ceiling() -> float:
    """GB/s of a large copy by a kernel, read and written bytes counted."""
    source = [torch.randn(1 << 28, device="cuda") for _ in range(2)]
    target = torch.empty_like(source[0])
    return 2 * target.nbytes / microseconds([lambda s=s: torch.neg(s, out=target) for s in source]) / 1e3


def run() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    ours, torchs = make_ops()
    copy = copy_ceiling()
    print(f"copy {copy:.0f} GB/s", flush=True)
    rows = products(ours) + chains(ours, torchs)
    return rows + elementwise(ours, torchs, copy) + rope_writes(ours, torchs, copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    chosen = parser.parse_args()
    with torch.inference_mode():
        rows = run()
    print_table(rows)
    print(write_results("ops", rows, chosen.results))


if __name__ == "__main__":
    main()
