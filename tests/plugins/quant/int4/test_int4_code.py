"""What the 4-bit products compile to, on machines without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pegboard_quant.int4.cuts import AnyCut, Cut, HeldCut, StreamedCut, held_cut, rows_cut
from pegboard_quant.int4.launching import Int4Launcher
from pegboard_quant.int4.layout import LEAST_ROWS, TILE, TiledWeight, groups_of
from pegboard_quant.int4.legal import Place, illegal

FULL = bool(os.environ.get("PEGBOARD_FULL"))
CAPABILITIES = [90, pytest.param(80, marks=pytest.mark.full)]


def tiled(outputs: int, inputs: int, group: int, shifted: bool = False) -> TiledWeight:
    row_tiles, tiles = -(-outputs // TILE), -(-inputs // TILE)
    return TiledWeight(
        shape=(outputs, inputs),
        group=groups_of(inputs, group)[0],
        scale_dtype=torch.bfloat16,
        words=torch.empty(row_tiles, tiles, TILE * TILE // 8, dtype=torch.int32),
        steps=torch.empty(groups_of(inputs, group)[1], row_tiles * TILE, dtype=torch.int32),
        counters=torch.zeros(row_tiles * TILE // LEAST_ROWS, dtype=torch.int32),
        shifted=shifted,
    )


def products(
    made: Any,
    capability: int,
    rows: int,
    group: int,
    dtype: torch.dtype,
    cut: AnyCut | None = None,
    shifted: bool = False,
    adds: bool = False,
) -> None:
    outputs, inputs = 6144, 4096
    x, out = torch.empty(rows, inputs, dtype=dtype), torch.empty(rows, outputs, dtype=dtype)
    launcher = Int4Launcher(divmod(capability, 10))
    cut = cut or launcher.cut_of(rows, outputs, inputs, group)
    assert cut is not None
    launcher.multiply_as(x, tiled(outputs, inputs, group, shifted), None, out, cut, adds=adds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("group", [128, pytest.param(64, marks=pytest.mark.full), 32])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_codes_go_from_registers_into_the_product(
    compile_for: Callable[..., Any], capability: int, group: int, dtype: torch.dtype
) -> None:
    counts = (9, 16, 64) if FULL or group == 128 else (16,)
    with compile_for(capability) as made:
        for rows in counts:
            cut = rows_cut(rows, 6144, 4096, group, wide=capability == 90)
            products(made, capability, rows, group, dtype, cut, adds=rows == 16)
    assert [found.kernel for found in made] == ["multiply_rows"] * len(counts)
    for found in made:
        assert found.stack == 0, "nothing spills"
        assert found.instructions["LOP3"] > 0
    for found in made:
        assert found.instructions["HGMMA" if capability == 90 else "HMMA"] > 0
        assert capability < 90 or not overwritten(found.code)
    assert all((found.instructions["ACQBULK"] > 0) == (capability == 90) for found in made), "dependent launch"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_offsets_spill_nothing(compile_for: Callable[..., Any], capability: int) -> None:
    with compile_for(capability) as made:
        for rows in (1, 16, 64) if FULL else (1, 64):
            products(made, capability, rows, 32, torch.bfloat16, shifted=True)
    for found in made:
        assert found.kernel == "multiply_rows"
        assert found.stack == 0
        assert found.instructions["HGMMA" if capability == 90 else "HMMA"] > 0
        assert capability < 90 or not overwritten(found.code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_words_of_few_rows_go_from_memory_to_the_product(compile_for: Callable[..., Any], dtype: torch.dtype) -> None:
    counts = (1, 2, 4) if FULL else (2, 4)
    with compile_for(90) as made:
        for rows in counts:
            products(made, 90, rows, 128, dtype, held_cut(rows, 6144, 4096), adds=rows != 2)
    assert [found.kernel for found in made] == ["multiply_held"] * len(counts)
    for found in made:
        assert found.stack == 0, "nothing spills"
        assert found.instructions["HMMA"] > 0
        assert found.instructions["ACQBULK"] > 0, "dependent launch"
        assert not found.instructions["LDGSTS"], "words don't go through shared memory"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("digits", [True, False])
def test_words_stream_through_registers_into_the_product(
    compile_for: Callable[..., Any], digits: bool, dtype: torch.dtype
) -> None:
    cuts = [(8, StreamedCut(64, 4, 4, 2, 2, digits)), (16, StreamedCut(128, 1, 4, 4, 2, digits))]
    if FULL:
        cuts += [(rows, StreamedCut(64, 5, 4, 1, 3, digits)) for rows in (1, 12)]
        cuts += [(16, StreamedCut(64, 1, 4, 2, 2, digits)), (16, StreamedCut(128, 3, 4, 4, 2, digits))]
    with compile_for(90) as made:
        for rows, cut in cuts:
            products(made, 90, rows, 128, dtype, cut, adds=cut.split == 4)
    assert [found.kernel for found in made if found.kernel != "split_digits"] == ["multiply_streamed"] * len(cuts)
    for found in made:
        assert found.stack == 0, "nothing spills"
        assert found.instructions["ACQBULK"] > 0, "dependent launch"
        if found.kernel == "multiply_streamed":
            assert found.instructions["IGMMA" if digits else "HGMMA"] > 0
            assert found.instructions["UTMALDG"] > 0, "x comes by bulk copies"
            assert not found.instructions["LDGSTS"], "words don't go through shared memory"
            assert not overwritten(found.code), "the left operand is read until the product is waited for"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tiles_are_fetched_into_the_l2(compile_for: Callable[..., Any], capability: int) -> None:
    with compile_for(capability) as made:
        products(made, capability, 16, 128, torch.bfloat16, Cut(64, 16, 4, 3, False, 2, True))
    (found,) = made
    assert found.stack == 0
    assert found.instructions["CCTL"] > 0


@pytest.mark.parametrize(
    "cut", [Cut(128, 64, 1, 4, whole=36, head=26), Cut(128, 64, 8, 3), Cut(128, 64, 8, 3, False, 2, True, spread=True)]
)
def test_sums_in_parts_spill_nothing(compile_for: Callable[..., Any], cut: Cut) -> None:
    with compile_for(90) as made:
        products(made, 90, 64, 128, torch.bfloat16, cut)
    (found,) = made
    assert found.kernel == "multiply_rows"
    assert found.stack == 0
    assert not overwritten(found.code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize("rows", [128, 256])
def test_a_tile_is_unpacked_while_another_is_multiplied(
    compile_for: Callable[..., Any], rows: int, dtype: torch.dtype
) -> None:
    with compile_for(90) as made:
        products(made, 90, rows, 128, dtype)
        products(made, 90, rows, 128, dtype, Cut(128, 128, 2, 3), adds=True)
    for found in made:
        assert found.kernel == "multiply_many"
        assert found.stack == 0, "nothing spills"
        assert found.instructions["UTMALDG"] > 0, "x comes by bulk copies"
        assert not overwritten(found.code), "the left operand is read until the product is waited for"


def test_a_few_rows_may_be_multiplied_so(compile_for: Callable[..., Any]) -> None:
    with compile_for(90) as made:
        for cut in (Cut(128, 16, 4, 3, True), Cut(128, 64, 1, 3, True)):
            products(made, 90, cut.block_m, 128, torch.bfloat16, cut)
    for found in made:
        assert found.kernel == "multiply_many"
        assert found.stack == 0
        assert not overwritten(found.code)


def test_all_kernels_compile(compile_for: Callable[..., Any]) -> None:
    """Whatever Triton is installed, see `test_triton_releases`."""
    cuts = [
        (1, HeldCut(16, 8, 1)),
        (8, StreamedCut(64, 4, 4, 2, 2, digits=False)),
        (16, StreamedCut(128, 1, 4, 4, 2, digits=True)),
        (64, Cut(128, 64, 1, 3, fetched=2, early=True)),
        (64, Cut(128, 64, 1, 4, fetched=2, early=True, whole=36, head=26)),
        (64, Cut(128, 64, 8, 3, fetched=2, early=True, spread=True)),
        (128, Cut(64, 128, 2, 3)),
    ]
    with compile_for(90) as made:
        for rows, cut in cuts:
            products(made, 90, rows, 128, torch.bfloat16, cut)
        Int4Launcher((9, 0)).dequantise(tiled(6144, 4096, 128), torch.bfloat16)
    kernels = [found.kernel for found in made]
    assert kernels[:2] == ["multiply_held", "multiply_streamed"]
    assert kernels[2:4] == ["split_digits", "multiply_streamed"]
    assert kernels[4:] == [*["multiply_rows"] * 3, "multiply_many", "dequantise_tiles"]
    for found in made:
        assert not overwritten(found.code)


_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Za-z0-9._]+)\s*([^;]*);", re.MULTILINE)


def overwritten(code: str) -> list[str]:
    """Instructions that write to registers from which a product in flight, `HGMMA` or `IGMMA`, reads its left operand:
    the hardware does not wait. Looks at the whole code in its order, and at each loop twice."""
    lines = [(int(place, 16), name, rest) for place, name, rest in _INSTRUCTION.findall(code)]
    index = {place: i for i, (place, _, _) in enumerate(lines)}
    bodies = [lines]
    for i, (place, name, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target and int(target[1], 16) < place:
            bodies.append(lines[index[int(target[1], 16)] : i + 1] * 2)
    found = []
    for body in bodies:
        groups: list[set[int]] = []
        begun: set[int] = set()
        for place, name, rest in body:
            first = rest.split(",")[0]
            written = re.match(r"R(\d+)\b", first.strip())
            if name.startswith(("HGMMA", "IGMMA")):
                left = re.match(r"R\d+, R(\d+), gdesc", rest)
                assert left, "the left operand is in registers"
                begun |= set(range(int(left[1]), int(left[1]) + 4))
                if "gsb0" in rest:
                    groups.append(begun)
                    begun = set()
            elif name.startswith("WARPGROUP.DEPBAR"):
                keep = int(rest.split(",")[1], 16)
                groups = groups[max(0, len(groups) - keep) :]
            elif written:
                wide = 4 if "128" in name else 2 if "64" in name or "WIDE" in name else 1
                registers = set(range(int(written[1]), int(written[1]) + wide))
                if registers & begun.union(*groups):
                    found.append(f"{place:#x} {name} {rest}")
    return found


def test_overwritten_operands_are_found() -> None:
    def code(*lines: str) -> str:
        return "".join(f"        /*{16 * i:04x}*/                   {line} ;\n" for i, line in enumerate(lines))

    product = "HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR12], R24, gsb0"
    assert overwritten(code(product, "HMUL2.BF16_V2 R155, R1, R2"))
    assert overwritten(code(product, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "LDG.E.128 R150, desc[UR8][R2.64]"))
    assert not overwritten(code(product, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "HMUL2.BF16_V2 R155, R1, R2"))
    assert not overwritten(code(product, "HMUL2.BF16_V2 R156, R152, R2"))
    assert overwritten(code("MOV R152, R1", product, "@P0 BRA 0x0")), "the next turn of a loop"


@pytest.mark.parametrize("outputs", [64, 1032, 2048, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("inputs", [64, 320, 2048, 4096, 5120, 14336, 57344])
def test_cuts_fit(outputs: int, inputs: int) -> None:
    """As many parts of sums as there are counters, no part without tiles, x in shared memory."""
    launcher, tiles = Int4Launcher((9, 0)), -(-inputs // TILE)
    counters = tiled(outputs, 64, 64).counters.numel()
    for rows in (1, 2, 3, 4, 5, 16, 17, 64, 65, 128, 129, 256, 512, 1023):
        cut = launcher.cut_of(rows, outputs, inputs, 128)
        assert cut is not None
        if isinstance(cut, HeldCut):
            assert rows <= 4
            assert cut.warps <= max(1, tiles)
            assert cut.ahead * cut.warps <= tiles + cut.warps - 1
            assert rows * -(-tiles // cut.warps) * cut.warps * TILE * 2 <= 200 << 10
        elif isinstance(cut, StreamedCut):
            place = Place(outputs=outputs, inputs=inputs, group=128, rows=rows)
            assert illegal(cut, place, (9, 0)) is None
        else:
            blocks = -(-outputs // cut.block_n) * -(-rows // cut.block_m)
            assert cut.split <= tiles
            assert cut.split == 1 or blocks <= counters
    assert launcher.cut_of(1024, outputs, inputs, 128) is None
    assert launcher.cut_of(257, outputs, inputs, 32) is None
