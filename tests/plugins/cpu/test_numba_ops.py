"""NumbaOps: when its kernels run, for every number of rows and threads, and what a row's bits depend on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("numba")

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.ops import Norm, OpsNeed
from pegboard.ops import TorchOps
from pegboard.testing.conformance import normal, same_bits
from pegboard.testing.oracles import ops as oracle
from pegboard_cpu.functions import ACTIVATIONS
from pegboard_cpu.ops import FEW_ROWS, NumbaOps

NEED = OpsNeed(device=DeviceFacts(type="cpu"), dtype="float32", hidden_size=96, head_sizes=(64,), activations=("silu",))
SIZE = 96


class Weighed(oracle.RowLinear):
    """Counts its calls."""

    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().__call__(x)


def linear_of(features: int, **kind: Any) -> Weighed:
    return Weighed(normal(features, SIZE, seed=1).float() / 8, normal(features, seed=2).float(), **kind)


@pytest.fixture
def ops() -> NumbaOps:
    assert not NumbaOps.refusals(NEED, None)
    return NumbaOps.create(NEED, None)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many threads, each worth its while however little there is to do."""
    before = torch.get_num_threads()
    monkeypatch.setattr("pegboard_cpu.ops._ENOUGH", 1)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("features", [6, 7, 8, 26, 193])
def test_every_number_of_rows(ops: NumbaOps, threads: int, features: int) -> None:
    """With features that no tile divides, fewer tiles than threads, and all that is fused."""
    norm = Norm(weight=normal(SIZE, seed=3).float(), eps=0.1, offset=1.0)
    plain, gated = linear_of(features), linear_of(2 * features)
    for rows in range(1, FEW_ROWS + 1):
        x, residual = normal(rows, SIZE).float(), normal(rows, features, seed=4).float()
        expected = residual.double() + plain.exact(oracle.rms_norm(x, norm))
        found = ops.project(x, plain, norm=norm, residual=residual)
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=5e-5)
        expected = residual.double() + oracle.gated(gated.exact(x), "silu")
        found = ops.project(x, gated, activation="silu", residual=residual)
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=5e-5)
    assert (plain.calls, gated.calls) == (0, 0)


def test_other_linears_are_called(ops: NumbaOps) -> None:
    x = normal(FEW_ROWS + 1, SIZE).float()
    for rows, linear in (
        (FEW_ROWS + 1, linear_of(32)),
        (3, linear_of(32, packed=True)),
        (3, linear_of(32, partition="input")),
        (3, linear_of(2)),
    ):
        found = ops.project(x[:rows], linear)
        torch.testing.assert_close(found.double(), linear.exact(x[:rows]), rtol=2e-5, atol=2e-5)
        assert linear.calls == 1


def test_rows_and_threads_do_not_change_a_bit(ops: NumbaOps) -> None:
    """Of kernels on few rows, asked for or not; and of any number, asked for."""
    linear, norm = linear_of(2 * 101), Norm(weight=normal(SIZE, seed=3).float(), eps=1e-5)
    x = normal(70, SIZE).float()
    alone = torch.cat([ops.project(row[None], linear, norm=norm, activation="silu") for row in x])
    together = ops.project(x[:FEW_ROWS], linear, norm=norm, activation="silu")
    assert same_bits(together, alone[:FEW_ROWS])
    ops = NumbaOps.create(replace(NEED, batch_invariant=True), None)
    assert same_bits(ops.project(x, linear, norm=norm, activation="silu"), alone)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_out(ops: NumbaOps, activation: Any) -> None:
    """Where exp leaves float32, at infinity, and for NaN."""
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([-1e30, -1e4, -0.0, 1e-30, 1e4, 1e30])])
    x = torch.stack([gate, torch.ones_like(gate)]).flatten()[None]
    expected = oracle.gated(x, activation)
    torch.testing.assert_close(ops.gated(x, activation).double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert ops.gated(torch.tensor([[torch.nan, 1.0]]), activation).isnan().all()
    assert ops.gated(torch.tensor([[torch.inf, 1.0]]), activation).isposinf().all()


def test_what_it_is_not_for_is_refused() -> None:
    cuda, half = replace(NEED, device=DeviceFacts(type="cuda")), replace(NEED, dtype="float16")
    assert NumbaOps.refusals(cuda, None) == ["runs on the CPU, not on cuda"]
    assert NumbaOps.refusals(half, None) == ["computes in float32, not in float16"]


def test_views_that_do_not_fit_go_torch_s_way(ops: NumbaOps) -> None:
    wide, norm = normal(SIZE, 10).float(), Norm(weight=normal(SIZE, seed=3).float(), eps=1e-5)
    linear = linear_of(32)
    for count in (2, 5):
        x = wide[:, :count].T
        torch.testing.assert_close(ops.norm(x, norm), TorchOps().norm(x, norm))
        torch.testing.assert_close(ops.gated(x, "silu"), TorchOps().gated(x, "silu"))
        torch.testing.assert_close(ops.project(x, linear).double(), linear.exact(x), rtol=2e-5, atol=2e-5)
