"""`pegboard tune`: every way of every product is measured, and the fastest that is right is written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard import ConfigError, Part, PluginError, hookimpl
from pegboard.cli.main import main
from pegboard.contracts.checkpoint import TensorInfo
from pegboard.contracts.quantizer import KernelTuner, LinearSpec, QuantizerNeed, Shard, TunedProduct
from pegboard.tuning import TuneReport, tune
from pegboard_quant.dense import DenseQuantizer
from pegboard_quant.options import DenseOptions


class Workshop:
    """A device whose kernels take as long as it is told. Its clock stands still but for them."""

    def __init__(self, seconds: Mapping[str, Sequence[float]], wrong: Sequence[str] = ()) -> None:
        #: Of a way, brief and long: how long a launch takes each time that it is measured.
        self.seconds = seconds
        self.wrong = wrong
        self.now = 0.0
        self.last = ""
        self.prepared: list[int] = []
        self.targets: list[tuple[str, float]] = []
        self.linears: list[str] = []

    def launch(self, way: str) -> None:
        self.last = way
        self.now += self.seconds[way][min(sum(1 for name, _ in self.targets if name == way), 2) // 2]

    def prepare(self, calls: Sequence[Callable[[], object]]) -> None:
        self.prepared.append(len(calls))

    def microseconds(self, calls: Sequence[Callable[[], object]], target: float) -> float:
        calls[0]()
        self.targets.append((self.last, target))
        begin = self.now
        for call in calls:
            call()
        return (self.now - begin) * 1e6 / len(calls)

    def plugin(self) -> object:
        workshop = self

        class Tuner(KernelTuner):
            def products(
                self,
                linears: Sequence[LinearSpec],
                stored: Mapping[str, TensorInfo],
                shard: Shard,
                rows: Sequence[int],
            ) -> Iterator[TunedProduct]:
                workshop.linears = [spec.name for spec in linears]
                assert set(stored) >= {f"{source}.weight" for spec in linears for source in spec.sources}
                for count in rows:
                    ways = {way: [lambda way=way: workshop.launch(way)] * 3 for way in workshop.seconds}
                    yield TunedProduct(
                        name=f"{count} rows", ways=ways, is_right=lambda: workshop.last not in workshop.wrong
                    )

            def table(self, chosen: Mapping[str, tuple[str, float]]) -> Mapping[str, Any]:
                return {"chosen": {name: way for name, (way, _) in chosen.items()}}

        class Tuned(DenseQuantizer):
            @classmethod
            def tuner(cls, need: QuantizerNeed, options: DenseOptions) -> KernelTuner:
                assert need.device.type == "cpu"
                assert options.pack is False
                return Tuner()

        class Plugin:
            @hookimpl
            def pegboard_parts(self) -> tuple[Part, ...]:
                return (Part(role="quantizer", name="tuned", factory=Tuned, options=DenseOptions, summary="a test's"),)

        return Plugin()

    def tune(self, model: Path, out: Path, **settings: Any) -> TuneReport:
        config = {"model": str(model), "device": "cpu", "quantizer": {"use": "tuned", "options": {"pack": False}}}
        return tune(config, out, meter=self, plugins=[self.plugin()], **settings)


def test_the_fastest_way_is_written_down(tiny_path: Path, tmp_path: Path) -> None:
    workshop = Workshop({"usual": (5.0, 5.0), "slow": (9.0, 9.0), "fast": (2.0, 2.0)})
    said: list[str] = []
    report = workshop.tune(tiny_path, tmp_path / "t.json", rows=(16, 1, 16), say=said.append)
    assert [one.product for one in report.found] == ["1 rows", "16 rows"]
    for one in report.found:
        assert (one.way, one.ways) == ("fast", 3)
        assert one.microseconds == pytest.approx(2e6)
        assert one.untuned_microseconds == pytest.approx(5e6)
    assert json.loads((tmp_path / "t.json").read_text()) == {"chosen": {"1 rows": "fast", "16 rows": "fast"}}
    assert workshop.prepared == [3, 3], "one call of each way is compiled before any is measured"
    assert "model.layers.0.mlp.down_proj" in workshop.linears
    assert len(said) == 2


def test_those_ahead_are_measured_again(tiny_path: Path, tmp_path: Path) -> None:
    """What a short look finds may be chance: the longer one decides. Ways far behind have no second one."""
    seconds = {f"slow{index}": (10.0 + index, 1.0) for index in range(4)}
    workshop = Workshop({"usual": (9.0, 4.0), "lucky": (1.0, 6.0), "steady": (2.0, 3.0), **seconds})
    report = workshop.tune(tiny_path, tmp_path / "t.json", rows=(4,))
    assert report.found[0].way == "slow0", "fourth of the short look, first of the long one"
    targets = {way: [target for name, target in workshop.targets if name == way] for way in workshop.seconds}
    assert [len(targets[f"slow{index}"]) for index in range(4)] == [2, 1, 1, 1]
    assert targets["usual"][0] < targets["usual"][1]


def test_wrong_ways_are_left_out(tiny_path: Path, tmp_path: Path) -> None:
    seconds = {"usual": (5.0, 5.0), "wrong": (1.0, 1.0)}
    said: list[str] = []
    report = Workshop(seconds, wrong=["wrong"]).tune(tiny_path, tmp_path / "t.json", rows=(1,), say=said.append)
    assert report.found[0].way == "usual"
    assert "1 rows: wrong gives a wrong result here and is left out" in said
    with pytest.raises(PluginError, match="none of 2 ways gives the right result"):
        Workshop(seconds, wrong=["wrong", "usual"]).tune(tiny_path, tmp_path / "other.json", rows=(1,))
    assert not (tmp_path / "other.json").exists()


def test_what_can_not_be_tuned_is_refused(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workshop = Workshop({"usual": (5.0, 5.0)})
    with pytest.raises(ConfigError, match="rows are none, must be whole numbers from 1 on"):
        workshop.tune(tiny_path, tmp_path / "t.json", rows=())
    with pytest.raises(ConfigError, match="name a file in a folder that exists"):
        workshop.tune(tiny_path, tmp_path / "nowhere" / "t.json")
    with pytest.raises(ConfigError, match=r"quantizer 'none' has nothing to tune; those that do: awq.*int4.*tuned"):
        tune({"model": str(tiny_path), "device": "cpu"}, tmp_path / "t.json", plugins=[workshop.plugin()])
    command = ["tune", str(tmp_path / "t.json"), "-m", str(tiny_path), "--set", "device=cpu", "--set", "quantizer=int4"]
    assert main([*command, "--rows", "1", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "need a CUDA device" in error["message"]
    assert not (tmp_path / "t.json").exists()


def test_a_tuner_must_be_one(tiny_path: Path, tmp_path: Path) -> None:
    class Wrong(DenseQuantizer):
        @classmethod
        def tuner(cls, need: QuantizerNeed, options: DenseOptions) -> object:
            return "fast"

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> tuple[Part, ...]:
            return (Part(role="quantizer", name="wrong", factory=Wrong, options=DenseOptions, summary="a test's"),)

    config = {"model": str(tiny_path), "device": "cpu", "quantizer": "wrong"}
    with pytest.raises(PluginError, match="'wrong': tuner gave 'fast', must be a KernelTuner"):
        tune(config, tmp_path / "t.json", plugins=[Plugin()])


def test_the_command_says_what_was_found(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has no plugins of its own, so what it calls is handed them here."""
    workshop = Workshop({"usual": (5.0, 5.0), "fast": (4.0, 4.0)})

    def with_plugin(config: Any, out: Path, **settings: Any) -> TuneReport:
        return tune(config, out, meter=workshop, plugins=[workshop.plugin()], **settings)

    monkeypatch.setattr("pegboard.tuning.tune", with_plugin)
    out = tmp_path / "t.json"
    command = ["tune", str(out), "-m", str(tiny_path), "--set", "device=cpu", "--rows", "3", "--rows", "2"]
    command += ["--set", "quantizer.use=tuned", "--set", "quantizer.options.pack=false"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "2 products of tuned on " in printed.out
    assert "25.0% faster in all" in printed.out
    assert printed.err.count(" us with fast, ") == 2
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["product"] for one in report["found"]] == ["2 rows", "3 rows"]
