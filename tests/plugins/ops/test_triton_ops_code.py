"""What the ops compile to, on machines without a GPU: nothing spills, loads are wide, matmuls use the tensor cores."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.device import DeviceFacts, TensorSpec
from pegboard.contracts.ops import Norm, OpsNeed, Rope
from pegboard_ops.triton_ops import TritonOps

BF16 = torch.bfloat16
CAPABILITIES = [90, pytest.param(80, marks=pytest.mark.full)]


class Dense:
    bias = partition = None

    def __init__(self, outputs: int, inputs: int) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=BF16)
        self.out_features, self.in_features, self.weight_bytes = outputs, inputs, self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a product of few rows is a kernel's")


def make_ops(capability: int) -> TritonOps:
    device = DeviceFacts(type="cuda", capability=divmod(capability, 10))
    return TritonOps(
        OpsNeed(device=device, dtype="bfloat16", hidden_size=4096, head_sizes=(128,), activations=("silu",))
    )


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16)


def norm(size: int) -> Norm:
    return Norm(weight=empty(size), eps=1e-5)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_elementwise(compile_for: Callable[..., Any], capability: int) -> None:
    ops = make_ops(capability)
    with compile_for(capability) as made:
        ops.norm(empty(64, 4096), norm(4096), empty(64, 4096))
        ops.norm(empty(4096, 1024), norm(1024))
        ops.gated(empty(64, 28672), "silu")
        ops.embed(torch.zeros(4, dtype=torch.int64), empty(100, 4096))
    assert [found.kernel for found in made] == ["rms_norm", "rms_norm", "gated_activation", "gather_rows"]
    assert all(found.stack == 0 for found in made)
    assert all(found.instructions["LDG"] <= 8 for found in made), "16 bytes a load"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("form", "tokens"), [("nhd", 4), ("nhd", 2048), ("hnd-int8", 4), ("hnd-int8", 2048)])
def test_rope_write(compile_for: Callable[..., Any], capability: int, form: str, tokens: int) -> None:
    heads, size, page = 8, 128, 64
    if form == "nhd":
        specs = [TensorSpec(name=n, shape=(page, heads, size), dtype="bfloat16") for n in ("k", "v")]
    else:
        specs = [
            TensorSpec(name="k", shape=(heads, page, size), dtype="uint8"),
            TensorSpec(name="v", shape=(heads, size, page), dtype="uint8"),
            TensorSpec(name="k_scale", shape=(heads, page), dtype="float32"),
            TensorSpec(name="v_scale", shape=(heads, page), dtype="float32"),
        ]
    tensors = {spec.name: torch.empty((4, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in specs}
    cache = LayerCache(layout=KVLayout(name=form, tensors=tuple(specs)), group=0, page_size=page, tensors=tensors)
    index = torch.zeros(tokens, dtype=torch.int64)
    rope = Rope(cos=torch.empty(64, 64), sin=torch.empty(64, 64))
    with compile_for(capability) as made:
        make_ops(capability).rope_write(
            empty(tokens, 48 * 128), (32, 8, 128), index, rope, cache, index, norm(128), norm(128)
        )
    apart = form != "nhd" and tokens > 4
    assert [found.kernel for found in made] == ["rotate_and_write", "write_values"][: 1 + apart]
    assert all(found.stack == 0 for found in made)
    if apart:
        # A warp stores bytes of 32 tokens, side by side, of one element: else each is a transaction of its own
        ir = made[1].layouts
        store = re.search(r"tt\.store .*tensor<(\d+)x(\d+)x!tt\.ptr<i8>, (#\w+)>", ir)
        assert store is not None
        lanes = re.search(rf"{store[3]} = .*threadsPerWarp = \[(\d+), (\d+)\]", ir)
        assert lanes is not None
        assert lanes[1 if store[1] == "32" else 2] == "32"


def test_few_rows_let_the_next_kernel_start_before_they_wait(compile_for: Callable[..., Any]) -> None:
    ops = make_ops(90)
    with compile_for(90) as made:
        for tokens in (2, 3):
            ops.norm(empty(tokens, 4096), norm(4096))
        for tokens in (16, 17):
            ops.gated(empty(tokens, 2 * 14336), "silu")
    early = [found.code.index("PREEXIT") < found.code.index("ACQBULK") for found in made]
    assert early == [True, False, True, False]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_row(compile_for: Callable[..., Any], capability: int) -> None:
    ops = make_ops(capability)
    with compile_for(capability) as made:
        ops.project(empty(1, 4096), Dense(6144, 4096), norm=norm(4096))
        ops.project(empty(1, 14336), Dense(4096, 14336), residual=empty(1, 4096))
        ops.project(empty(1, 1024), Dense(6144, 1024), norm=norm(1024), activation="silu")
    assert [found.kernel for found in made] == ["project_row"] * 3
    assert all(found.stack == 0 for found in made)
    # 16 bytes a load: 4 rows of 4096 by 128 threads are 16 of them, and the vectors
    assert made[0].instructions["LDG"] <= 26
    assert all((found.instructions["ACQBULK"] > 0) == (capability == 90) for found in made), "dependent launch"


@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.full), 16, 32, 64])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_whose_weights_are_held(compile_for: Callable[..., Any], capability: int, rows: int) -> None:
    ops = make_ops(capability)
    with compile_for(capability) as made:
        ops.project(empty(rows, 3072), Dense(1024, 3072), residual=empty(rows, 1024))
        ops.project(empty(rows, 1024), Dense(2048, 1024), norm=norm(1024) if rows <= 32 else None, activation="silu")
        if rows <= 32:
            ops.project(empty(rows, 1024), Dense(6144, 1024), norm=norm(1024), activation="silu")
    assert [found.kernel for found in made] == ["project_held"] * (3 if rows <= 32 else 2)
    for found in made:
        # 32 rows of x beside 32 of the weight take all registers: some triton versions keep a few addresses elsewhere
        assert found.stack <= (40 if found is made[-1] and rows == 32 else 0)
        assert found.instructions["HMMA"] > 0
        assert found.instructions["LDSM"] == 0, "weights and x come to their registers without shared memory"
        assert (found.instructions["ACQBULK"] > 0) == (capability == 90), "dependent launch"
    held, inputs = made[0].instructions, 3072
    warps = 16 if rows == 16 else 8
    # 16 bytes a load: of 16 rows of the weight, of x, and the residual
    assert held["LDG"] <= (16 + max(8, rows)) * inputs // (warps * 32 * 8) + max(2, rows // 16)


def test_few_rows(compile_for: Callable[..., Any]) -> None:
    ops = make_ops(90)
    with compile_for(90) as made:
        ops.project(empty(4, 4096), Dense(4096, 4096), residual=empty(4, 4096))
        ops.project(empty(16, 4096), Dense(28672, 4096), activation="silu")
    assert [found.kernel for found in made] == ["project_few", "add_parts", "project_few"]
    assert all(found.stack == 0 for found in made)
    for found in (made[0], made[2]):
        assert found.instructions["HGMMA"] > 0
        assert found.instructions["UTMALDG"] > 0
        assert found.instructions["HMMA"] == 0
