"""The three ways to round: against their definitions, and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pegboard.contracts.quantizer import LinearStatistics
from pegboard.errors import ConfigError
from pegboard_quant.options import RoundingOptions
from pegboard_quant.packed.gptq_rounding import DAMPING, gptq_codes
from pegboard_quant.packed.rounding import Grid, grid_of
from pegboard_quant.packed.writing import PackQuantizedWriter


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(columns: int, rows: int = 400) -> Tensor:
    """Rows whose columns depend on each other, and are of very different size."""
    mixed = normal(rows, columns, seed=1) @ (normal(columns, columns, seed=2) / columns**0.5 + torch.eye(columns))
    return mixed * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]


def seen(x: Tensor) -> LinearStatistics:
    return LinearStatistics(moment=x.T @ x / len(x), magnitude=x.abs().mean(0))


def by_definition(weight: Tensor, grid: Grid, moment: Tensor) -> Tensor:
    """Optimal brain quantization in a fixed order, in float64: the inverse shrinks by one column at a time."""
    order = moment.diagonal().argsort(descending=True).tolist()
    damped = moment.double() + DAMPING * moment.diagonal().double().mean() * torch.eye(len(moment), dtype=torch.float64)
    inverse, left = torch.linalg.inv(damped), weight.double().clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    rest = list(order)
    for column in order:
        group = column // grid.group
        scale = grid.scales[:, group].double()
        zero = float(1 << (grid.bits - 1)) if grid.zeros is None else grid.zeros[:, group].double()
        code = ((left[:, column] / scale).round() + zero).clamp(0, (1 << grid.bits) - 1)
        codes[:, column] = code.to(torch.uint8)
        error = (left[:, column] - (code - zero) * scale) / inverse[column, column]
        rest.remove(column)
        left[:, rest] -= error[:, None] * inverse[column, rest]
        inverse = inverse - inverse[:, column, None] * inverse[None, column] / inverse[column, column]
    return codes


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 32, False), (4, -1, True), (8, 64, False)])
def test_gptq_is_what_the_paper_says(bits: int, group: int, symmetric: bool) -> None:
    """Over more than one block of columns, and a last group that is shorter."""
    weight, moment = normal(24, 150), seen(inputs(150)).moment
    grid = grid_of(weight, bits, group, symmetric=symmetric)
    same = gptq_codes(weight, grid, moment) == by_definition(weight, grid, moment)
    assert same.float().mean() > 0.995, "but for ties, which float32 breaks otherwise"


def test_gptq_of_inputs_that_do_not_depend_on_each_other_is_the_nearest() -> None:
    weight = normal(16, 64)
    grid = grid_of(weight, 4, 32, symmetric=False)
    assert torch.equal(gptq_codes(weight, grid, torch.eye(64)), grid.codes(weight))


def test_gptq_of_inputs_that_are_always_zero() -> None:
    x = inputs(64)
    x[:, 5:40] = 0
    grid = grid_of(normal(16, 64), 4, 32, symmetric=False)
    weight = normal(16, 64)
    assert torch.equal(gptq_codes(weight, grid, seen(x).moment)[:, 5:40], grid.codes(weight)[:, 5:40])


def read(stored: dict[str, Tensor], bits: int, group: int) -> Tensor:
    """What pack-quantized tensors mean, by the format's definition."""
    rows, columns = stored["weight_shape"].tolist()

    def numbers(words: Tensor, count: int) -> Tensor:
        shifts = torch.arange(0, 32, bits)
        return ((words.long()[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count]

    group_of = torch.arange(columns) // (columns if group == -1 else group)
    zeros: Tensor | int = 1 << (bits - 1)
    if "weight_zero_point" in stored:
        zeros = numbers(stored["weight_zero_point"].T, rows).T[:, group_of]
    return stored["weight_scale"].float()[:, group_of] * (numbers(stored["weight_packed"], columns) - zeros)


def error(weight: Tensor, found: Tensor, x: Tensor) -> float:
    return float(((found - weight) @ x.T).norm() / (weight @ x.T).norm())


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, -1), (8, 128)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_each_method_loses_less_than_the_nearest(bits: int, group: int, symmetric: bool) -> None:
    weight, x = normal(40, 192), inputs(192)
    options, statistics = RoundingOptions(group=group, symmetric=symmetric), seen(x)
    lost = {}
    for method in ("rtn", "awq", "gptq"):
        writer = PackQuantizedWriter(bits, method, options)
        scales = writer.scales(weight, statistics) if writer.folds else torch.ones(192)
        stored = dict(writer.tensors(weight * scales, statistics if writer.needs_statistics else None))
        lost[method] = error(weight, read(stored, bits, group) / scales, x)
    assert lost["awq"] < 0.95 * lost["rtn"]
    assert lost["gptq"] < 0.7 * lost["rtn"]
    assert lost["rtn"] < (0.25 if bits == 4 else 0.02)


def test_an_unknown_method_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="method 'quip' is unknown; known are rtn, awq, gptq"):
        PackQuantizedWriter(4, "quip", RoundingOptions())
