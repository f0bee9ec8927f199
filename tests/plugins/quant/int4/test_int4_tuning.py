"""What `pegboard tune` measures of the INT4 products, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.errors import ConfigError
from pegboard_quant.int4.cuts import AnyCut, Cut, HeldCut
from pegboard_quant.int4.launching import Int4Launcher
from pegboard_quant.int4.layout import TiledWeight, untile
from pegboard_quant.int4.legal import Place, candidates, illegal
from pegboard_quant.int4.tuning import Int4Tuner
from pegboard_quant.options import Rounding4Options
from pegboard_quant.packed.on_load import Int4Quantizer
from pegboard_quant.packed.weight import dense

SPEC = LinearSpec(name="a.qkv_proj", sources=("a.q", "a.k"), in_features=256, out_features=(128, 64))


class Launcher(Int4Launcher):
    """Multiplies on the CPU, wrongly with some cuts, and notes with which cuts and weights it was asked to."""

    def __init__(self, wrong: Callable[[AnyCut], bool] = lambda cut: False) -> None:
        super().__init__((9, 0))
        self.wrong = wrong
        self.asked: list[tuple[AnyCut, int]] = []

    def multiply_as(self, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor, cut: AnyCut) -> None:
        self.asked.append((cut, weight.words.data_ptr()))
        out.copy_(x.float() @ dense(untile(weight)).T * (0.5 if self.wrong(cut) else 1.0))


def tuner(launcher: Launcher, group: int = 128) -> Int4Tuner:
    # The tensors are on the CPU; what is allowed is asked for a Hopper
    need = QuantizerNeed(device=DeviceFacts(type="cpu", name="NVIDIA H200", capability=(9, 0)), dtype="bfloat16")
    # Groups of 128 and of all columns are alike
    shapes = [(192, 256, group), (192, 256, max(group, 256 if group == 128 else 0))]
    return Int4Tuner(need, lambda spec, stored, shard: shapes, launcher, 132, 1)


def test_products_have_legal_ways_that_are_checked() -> None:
    launcher = Launcher(lambda cut: not isinstance(cut, HeldCut) and cut.split == 2)
    made, seen = tuner(launcher), []
    for product in made.products([SPEC, replace(SPEC, name="b")], {}, Shard(), (1, 16, 100)):
        seen.append(product.name)
        rows = int(product.name.split(", ")[2].split()[0])
        before = launcher.cut_of(rows, 192, 256, 128)
        for index, calls in enumerate(product.ways.values()):
            launcher.asked.clear()
            for call in calls:
                call()
            cuts, weights = zip(*launcher.asked, strict=True)
            assert len(set(cuts)) == 1
            assert len(set(weights)) == len(weights) >= 2, "each call takes other memory"
            assert illegal(cuts[0], Place(outputs=192, inputs=256, group=128, rows=rows), (9, 0)) is None
            assert product.is_right() == (not launcher.wrong(cuts[0]))
            assert not product.is_right(), "nothing was written since"
            assert index or cuts[0] == before, "what is taken so far comes first"
        assert len(product.ways) > 3
    assert seen == [f"192 x 256, groups of 128, {rows} rows" for rows in (1, 16, 100)], "each shape once"


def test_the_table_is_read_again(tmp_path: Path) -> None:
    """The fastest by a measurement that is made up: the more warps or parts, the faster."""
    made, chosen, best = tuner(Launcher()), {}, {}
    for product in made.products([SPEC], {}, Shard(), (2, 16)):
        costs: dict[str, float] = {}
        for way, calls in product.ways.items():
            made._launcher.asked.clear()  # type: ignore[attr-defined]
            calls[0]()
            ((cut, _),) = made._launcher.asked  # type: ignore[attr-defined]
            parts = cut.warps if isinstance(cut, HeldCut) else cut.split
            costs[way] = 1 / parts + cut.block_n / 1000
            best.setdefault(product.name, {})[way] = cut
        way = min(costs, key=costs.__getitem__)
        chosen[product.name] = way, costs[way]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(made.table(chosen)))
    need = QuantizerNeed(device=DeviceFacts(type="cuda", name="NVIDIA H200", capability=(9, 0)), dtype="bfloat16")
    quantizer = Int4Quantizer.create(need, Rounding4Options(table=path))
    for rows in (2, 16):
        name = f"192 x 256, groups of 128, {rows} rows"
        assert quantizer._launcher is not None
        assert quantizer._launcher.cut_of(rows, 192, 256, 128) == best[name][chosen[name][0]]


def test_rows_without_a_choice_are_refused_or_left_out() -> None:
    with pytest.raises(ConfigError, match="products of 1024 rows have no cut with groups of 128"):
        next(tuner(Launcher()).products([SPEC], {}, Shard(), (16, 1024)))
    for group, most in ((128, 512), (32, 256)):
        names = [product.name for product in tuner(Launcher(), group).products([SPEC], {}, Shard(), None)]
        assert names == [f"192 x 256, groups of {group}, {1 << n} rows" for n in range(most.bit_length())]


def test_shapes_are_those_of_what_is_rounded() -> None:
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype="float32")

    def shapes(spec: LinearSpec = SPEC, shard: Shard | None = None, **options: Any) -> list[tuple[int, int, int]]:
        return Int4Quantizer.create(need, Rounding4Options(**options)).kernel_shapes(spec, {}, shard or Shard())

    assert shapes() == [(192, 256, 128)]
    assert shapes(skip=("k",)) == [(128, 256, 128)]
    assert shapes(skip=("qkv_proj",)) == []
    assert shapes(group=-1) == [(192, 256, 256)]
    halves = Shard(rank=1, size=2, all_reduce=lambda x: x)
    assert shapes(replace(SPEC, partition="output"), halves) == [(96, 256, 128)]
    assert shapes(replace(SPEC, partition="input"), halves, group=32) == [(192, 128, 32)]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
def test_there_are_candidates_on_every_device(capability: tuple[int, int], group: int, rows: int) -> None:
    for outputs, inputs in ((64, 320), (6144, 4096), (128256, 8192)):
        place = Place(outputs=outputs, inputs=inputs, group=group, rows=rows)
        found = list(candidates(place, capability, 108))
        assert len(set(found)) == len(found) > 0
        assert all(illegal(cut, place, capability) is None for cut in found)


def test_blocks_that_are_no_multiple_of_the_multiprocessors_are_evened_out() -> None:
    def uneven(outputs: int, rows: int = 64) -> set[tuple[int, int]]:
        found = candidates(Place(outputs=outputs, inputs=4096, group=128, rows=rows), (9, 0), 132)
        return {(cut.block_n, cut.whole) for cut in found if isinstance(cut, Cut) and cut.head}

    assert uneven(28672) == {(128, 132)}
    assert uneven(12288) == {(64, 132)}
    assert uneven(4096) == set()
    assert uneven(2 * 132 * 128) == set(), "two blocks each"
    assert uneven(28672, 128) == set()


def test_programs_that_may_all_run_at_once_are_candidates_to_add_sums_together() -> None:
    def spread(outputs: int, rows: int) -> set[tuple[int, int]]:
        found = candidates(Place(outputs=outputs, inputs=4096, group=128, rows=rows), (9, 0), 132)
        return {(cut.block_n, cut.split) for cut in found if isinstance(cut, Cut) and cut.spread}

    assert spread(4096, 64) == {(64, 2), (64, 4), (64, 6), (64, 8), (128, 2), (128, 4), (128, 6), (128, 8), (128, 16)}
    assert spread(28672, 64) == {(128, 2)}
    assert spread(4096, 128) == set()
