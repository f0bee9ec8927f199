"""What the 4-bit products compile to, on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pegboard_quant.int4.launching import Cut, Int4Launcher, cut_of
from pegboard_quant.int4.layout import LEAST_ROWS, TILE, TiledWeight, groups_of

CAPABILITIES = [90, pytest.param(80, marks=pytest.mark.full)]


def tiled(outputs: int, inputs: int, group: int) -> TiledWeight:
    row_tiles, tiles = -(-outputs // TILE), -(-inputs // TILE)
    return TiledWeight(
        shape=(outputs, inputs),
        group=groups_of(inputs, group)[0],
        scale_dtype=torch.bfloat16,
        words=torch.empty(row_tiles, tiles, TILE * TILE // 8, dtype=torch.int32),
        steps=torch.empty(groups_of(inputs, group)[1], row_tiles * TILE, dtype=torch.int32),
        counters=torch.zeros(row_tiles * TILE // LEAST_ROWS, dtype=torch.int32),
    )


def products(made: Any, capability: int, rows: int, group: int, dtype: torch.dtype, cut: Cut | None = None) -> None:
    outputs, inputs = 6144, 4096
    x, out = torch.empty(rows, inputs, dtype=dtype), torch.empty(rows, outputs, dtype=dtype)
    launcher = Int4Launcher(divmod(capability, 10))
    launcher.multiply_as(
        x,
        tiled(outputs, inputs, group),
        None,
        out,
        cut or cut_of(rows, outputs, inputs, group, hopper=capability >= 90),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("group", [128, pytest.param(64, marks=pytest.mark.full), 32])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_codes_go_from_registers_into_the_product(
    compile_for: Callable[..., Any], capability: int, group: int, dtype: torch.dtype
) -> None:
    with compile_for(capability) as made:
        for rows in (1, 16, 64):
            products(made, capability, rows, group, dtype)
    assert [found.kernel for found in made] == ["multiply_rows"] * 3
    for found in made:
        assert found.stack == 0, "nothing spills"
        assert found.instructions["LOP3"] > 0
    for found in made:
        assert found.instructions["HGMMA" if capability == 90 else "HMMA"] > 0
    assert all((found.instructions["ACQBULK"] > 0) == (capability == 90) for found in made), "dependent launch"
