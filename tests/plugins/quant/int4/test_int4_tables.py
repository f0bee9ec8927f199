"""Tables of cuts: what is read, refused, shipped and taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import QuantizerNeed
from pegboard.errors import ConfigError
from pegboard_quant.int4.choice import new_launcher
from pegboard_quant.int4.cuts import Cut, HeldCut
from pegboard_quant.int4.launching import Int4Launcher
from pegboard_quant.int4.legal import Place, illegal
from pegboard_quant.int4.tables import Cuts, Entry, cuts_for, load_table, shipped
from pegboard_quant.options import Rounding4Options, RoundingOptions
from pegboard_quant.packed.on_load import Int4Quantizer

H200 = DeviceFacts(type="cuda", name="NVIDIA H200", capability=(9, 0))
A100 = DeviceFacts(type="cuda", name="NVIDIA A100-SXM4-80GB", capability=(8, 0))


def entry(rows: int = 16, **changed: Any) -> dict[str, Any]:
    cut = {"type": "blocks", "block_n": 64, "block_m": 16, "split": 2, "stages": 3, "overlapped": False}
    fields = {"outputs": 512, "inputs": 1024, "group": 128, "rows": rows, "cut": cut, "microseconds": 3.5}
    return fields | {"cut": cut | changed.pop("cut", {}), **changed}


def streamed(rows: int, cut: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    plain = {"type": "streamed", "block_n": 64, "split": 2, "depth": 4, "copied": 2, "stages": 2, "digits": True}
    return {**entry(rows), "cut": plain | (cut or {}), **changed}


def written(folder: Path, *entries: dict[str, Any], **changed: Any) -> Path:
    table = {"format": "pegboard-int4-cuts", "version": 1, "device": H200.name, "capability": [9, 0], "cuts": entries}
    path = folder / "table.json"
    path.write_text(json.dumps(table | changed))
    return path


def need(device: DeviceFacts) -> QuantizerNeed:
    return QuantizerNeed(device=device, dtype="bfloat16")


def test_a_table_decides_where_it_was_measured(tmp_path: Path) -> None:
    path = written(tmp_path, entry(16), entry(64, cut={"block_m": 64, "overlapped": True}))
    launcher, rules = new_launcher(need(H200), path), Int4Launcher((9, 0))
    assert launcher is not None
    for rows in (9, 16):
        assert launcher.cut_of(rows, 512, 1024, 128) == Cut(64, 16, 2, 3)
    assert launcher.cut_of(16, 512, 1024, 1024) == Cut(64, 16, 2, 3), "all groups of whole tiles are alike"
    assert launcher.cut_of(33, 512, 1024, 128) == Cut(64, 64, 2, 3, True)
    for rows, outputs, group in ((8, 512, 128), (32, 512, 128), (65, 512, 128), (16, 640, 128), (16, 512, 32)):
        cut = launcher.cut_of(rows, outputs, 1024, group)
        assert cut == rules.cut_of(rows, outputs, 1024, group), "nothing was measured: by rule"


def test_two_launchers_with_one_table_agree(tmp_path: Path) -> None:
    path = written(tmp_path, entry(16), entry(4, cut={"block_n": 128}))
    one, other = (new_launcher(need(H200), path) for _ in range(2))
    assert one is not None
    assert other is not None
    for rows in range(1, 600):
        for shape in ((512, 1024), (6144, 4096)):
            assert one.cut_of(rows, *shape, 128) == other.cut_of(rows, *shape, 128)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "is no table of INT4 cuts, version 1: Expected `object`, got `array`"),
        ("{", "is no table of INT4 cuts"),
        ('{"format": "x", "version": 1, "device": "a", "capability": [9, 0], "cuts": []}', "Invalid enum value 'x'"),
        ('{"version": 2, "device": "a", "capability": [9, 0], "cuts": []}', "Invalid enum value 2"),
        ('{"device": "a", "capability": [9, 0], "cuts": [], "more": 1}', "unknown field `more`"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_table(path, H200)
    assert told in str(raised.value)
    assert "make one with `pegboard tune`" in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_table(tmp_path / "no.json", H200)


def test_a_table_of_another_device_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, entry())
    with pytest.raises(ConfigError, match=r"measured on 'NVIDIA H200', this is 'NVIDIA A100-SXM4-80GB'.*tune` here"):
        load_table(path, A100)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (entry(cut={"block_n": 32}), "block_n must be one of 64, 128"),
        (entry(group=32, cut={"block_n": 128}), "block_n must be one of 64,"),
        (entry(cut={"stages": 9}), "stages must be 2 to 6"),
        (entry(cut={"split": 9}), "split must be 1 to 8"),
        (entry(rows=100), "and 1, and no head, for more than 8 sums"),
        (entry(group=64, cut={"overlapped": True}), "only on Hopper, with groups of 128"),
        (entry(rows=0), "rows must be 1 or more"),
        ({**entry(4), "cut": {"type": "held", "block_n": 16, "warps": 16, "ahead": 1}}, "up to 8 of them here"),
        ({**entry(4), "cut": {"type": "held", "block_n": 16, "warps": 4, "ahead": 3}}, "ahead must be 1 to 2"),
        ({**entry(8), "cut": {"type": "held", "block_n": 16, "warps": 4, "ahead": 1}}, "up to 4 rows"),
        (entry(cut={"fetched": 3}), "fetched must be 0, 1, 2 or 4"),
        (entry(cut={"overlapped": True, "early": True}), "be left out of more than 64 rows a program"),
        (entry(cut={"head": 8, "split": 1}), "head must be less than 8"),
        (entry(cut={"head": 4, "whole": 8, "split": 1}), "whole than 8"),
        (entry(cut={"whole": 1, "split": 1}), "head must be"),
        (entry(cut={"head": 4, "split": 2}), "split be 1"),
        (entry(cut={"head": 4, "split": 1, "overlapped": True}), "or overlapped"),
        (entry(cut={"split": 1, "spread": True}), "spread needs a split"),
        (entry(cut={"split": 2, "spread": True, "overlapped": True}), "or overlapped"),
        (streamed(17), "up to 16 rows"),
        (streamed(8, inputs=1001), "inputs of 8"),
        (streamed(8, group=64), "groups of 128 and more"),
        (streamed(8, cut={"block_n": 32}), "block_n must be 64 or 128"),
        (streamed(8, cut={"depth": 3}), "depth and copied be 1, 2 or 4"),
        (streamed(8, cut={"depth": 2, "copied": 4}), "copied must be no more than depth"),
        (streamed(8, cut={"stages": 0}), "stages be 1 to 8"),
        (streamed(8, cut={"split": 9}), "split must be 1 to 8"),
        (streamed(16, inputs=200_000, cut={"split": 1}), "must be no more than 196608"),
    ],
)
def test_cuts_that_can_not_run_are_refused(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    path = written(tmp_path, entry(), wrong)
    with pytest.raises(ConfigError, match=r"cuts\[1\] can't run") as raised:
        load_table(path, H200)
    assert told in str(raised.value)


def test_the_option_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, entry())
    options = Rounding4Options(table=path)
    assert Int4Quantizer.refusals(need(H200), options) == []
    (reason,) = Int4Quantizer.refusals(need(A100), options)
    assert "measured on 'NVIDIA H200'" in reason
    cpu = QuantizerNeed(device=DeviceFacts(type="cpu"), dtype="float32")
    (reason,) = Int4Quantizer.refusals(cpu, options)
    assert reason == "table: the INT4 kernels need a CUDA device; leave it out"
    assert Int4Quantizer.refusals(cpu, Rounding4Options()) == []
    assert Int4Quantizer.refusals(cpu, RoundingOptions()) == []


def test_what_is_shipped_can_run() -> None:
    assert {table.device for table in shipped()} == {"NVIDIA H200"}
    for table in shipped():
        for one in table.cuts:
            place = Place(outputs=one.outputs, inputs=one.inputs, group=one.group, rows=one.rows)
            assert illegal(one.cut, place, table.capability) is None
        keys = [(one.outputs, one.inputs, one.group, one.rows) for one in table.cuts]
        assert len(set(keys)) == len(keys)


def test_devices_without_a_table_take_one_of_their_kind() -> None:
    h100 = DeviceFacts(type="cuda", name="NVIDIA H100 80GB HBM3", capability=(9, 0))
    for rows in (1, 16, 64):
        measured = cuts_for(H200, None).cut(rows, 6144, 4096, 128)
        assert measured is not None
        assert cuts_for(h100, None).cut(rows, 6144, 4096, 128) == measured
        assert cuts_for(A100, None).cut(rows, 6144, 4096, 128) is None


def test_a_held_cut_may_be_measured(tmp_path: Path) -> None:
    held = {"type": "held", "block_n": 16, "warps": 4, "ahead": 2}
    (one,) = load_table(written(tmp_path, {**entry(2), "cut": held}), H200).cuts
    assert one.cut == HeldCut(16, 4, 2)
    cuts = Cuts([one, Entry(outputs=512, inputs=1024, group=32, rows=2, cut=Cut(64, 16, 1, 3), microseconds=1.0)])
    assert cuts.cut(2, 512, 1024, 128) == HeldCut(16, 4, 2)
    assert cuts.cut(2, 512, 1024, 32) == Cut(64, 16, 1, 3)
