"""`pegboard quantize`: the folders that it writes are what they say, and lose what the methods promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.cli.main import main
from pegboard.errors import ConfigError
from pegboard.quantizing import quantize
from pegboard.testing.tiny import tiny_model

TEXT = "the quick brown fox jumps over the lazy dog and then sleeps in the sun until it is time to eat again. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 40, encoding="utf-8")
    return file


def meant(folder: Path, twin: Path, bits: int, group: int) -> Path:
    """The folder with dense float32 weights, unpacked by the format's definition."""
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    dense = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            rows, columns = stored[f"{module}.weight_shape"].tolist()
            zeros = numbers(stored[f"{module}.weight_zero_point"].T, bits)[:, :rows].T
            group_of = torch.arange(columns) // group
            steps = numbers(tensor, bits)[:, :columns] - zeros[:, group_of]
            dense[f"{module}.weight"] = stored[f"{module}.weight_scale"].float()[:, group_of] * steps
        elif not suffix.startswith("weight_"):
            dense[name] = tensor.float()
    twin.mkdir()
    save_file(dense, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    return twin


def numbers(words: Tensor, bits: int) -> Tensor:
    return ((words.long()[:, :, None] >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)).flatten(1)


@pytest.mark.supports("Quantization", "pegboard quantize: rtn, awq and gptq, written as compressed-tensors")
@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_folder_is_read_again(tmp_path: Path, text: Path, check: Callable[..., None], method: str, bits: int) -> None:
    source = tiny_model(tmp_path / "m", tie_word_embeddings=method == "awq")
    options = {"group": 32, "symmetric": False}
    out = tmp_path / "out"
    report = quantize(
        source, out, scheme=f"int{bits}", method=method, options=options, calibration=text, samples=4, length=48
    )
    assert report.quantized == 3 * 7
    assert report.bytes_after < report.bytes_before
    assert report.perplexity_before is not None
    assert report.perplexity_after is not None
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.1 if bits == 8 else 1.0)
    assert report.held_out_tokens == 4 * 48
    check(out, twin=meant(out, tmp_path / "twin", bits, 32), new=8)


def test_experts(tmp_path: Path, text: Path, check: Callable[..., None]) -> None:
    """Routers stay dense; experts that no token chose are rounded to nearest, and counted."""
    source = tiny_model(tmp_path / "m", architecture="qwen3_moe")
    options = {"group": 32, "symmetric": False}
    report = quantize(source, tmp_path / "out", method="gptq", options=options, calibration=text, samples=1, length=16)
    assert 0 < report.uncalibrated < report.quantized
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in config["ignore"]
    check(tmp_path / "out", twin=meant(tmp_path / "out", tmp_path / "twin", 4, 32), new=8)


def test_the_command(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_model(tmp_path / "m")
    given = ["quantize", str(source), str(tmp_path / "out"), "--calibration", str(text), "--length", "32"]
    assert main([*given, "--method", "awq", "--group", "32", "--skip", "down_proj", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["scheme"], report["method"], report["quantized"]) == ("int4", "awq", 3 * 6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"], "--skip adds to the head"
    files = [tmp_path / "out" / name for name in ("model.safetensors", "config.json")]
    assert len({file.stat().st_mode for file in files}) == 1, "who may read one may read the other"
    assert main([*given, "--json"]) == 2
    assert "is not empty" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_groups_that_others_refuse_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tiny_model(tmp_path / "m", hidden_size=96, num_attention_heads=6, intermediate_size=128)
    quantize(source, tmp_path / "out", options={"group": 64})
    told = [record.getMessage() for record in caplog.records if "no whole groups" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("96 columns are no whole groups of 64")
    assert told[0].endswith("such as 32")


def test_without_a_text_nothing_is_measured(tmp_path: Path) -> None:
    report = quantize(tiny_model(tmp_path / "m"), tmp_path / "out", scheme="int8")
    assert report.perplexity_before is report.perplexity_after is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "quip"}, "method 'quip' is unknown"),
        ({"method": "gptq"}, "needs a text to calibrate with"),
        ({"scheme": "none"}, "writes no checkpoints; those that do: int4, int8"),
        ({"options": {"group": 48}}, "group"),
        ({"options": {"skip": ["lm_head", "downproj"]}}, "no linear 'downproj'; did you mean 'down_proj'"),
        ({"calibration": True, "length": 10_000}, "lower the length"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    tmp_path: Path, text: Path, changes: dict[str, Any], said: str
) -> None:
    source = tiny_model(tmp_path / "m", max_position_embeddings=20_000)
    if "calibration" in changes:
        changes = changes | {"calibration": text}
    with pytest.raises(ConfigError, match=said):
        quantize(source, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.model
def test_the_real_model(tmp_path: Path) -> None:
    """INT8 loses less than half a percent; at 4 bits both methods that calibrate lose less than rounding to nearest."""
    from pydoc_data.topics import topics

    file = tmp_path / "topics.txt"
    file.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    lost = {}
    for scheme, method, group in (
        ("int8", "rtn", -1),
        ("int4", "rtn", 128),
        ("int4", "awq", 128),
        ("int4", "gptq", 128),
    ):
        report = quantize(
            "smollm2-135m-instruct",
            tmp_path / f"{scheme}-{method}",
            scheme=scheme,
            method=method,
            options={"group": group},
            calibration=file,
            samples=8,
            length=256,
            device="cpu",
        )
        assert report.perplexity_before is not None
        assert report.perplexity_after is not None
        lost[scheme, method] = report.perplexity_after / report.perplexity_before - 1
    assert lost["int8", "rtn"] < 0.005
    assert lost["int4", "awq"] < lost["int4", "rtn"]
    assert lost["int4", "gptq"] < lost["int4", "rtn"]
