"""What becomes of a checkpoint's tensors: all named when they don't fit, reported when nothing uses them, mapped and
shared where nothing converts them, in the dtype that was asked for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard import CheckpointError, Engine, SamplingParams, hookimpl
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.observer import EngineReady
from pegboard.needs import choose_dtype
from pegboard.testing.tiny import tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


# -- the index


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    tiny_model(folder, shard_size="200KB")
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder, weight_map = sharded(tmp_path / "m")
    name = sorted(set(weight_map.values()))[1]
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ shards: {re.escape(name)}"):
        Engine(folder, device="cpu")


def test_a_tensor_that_the_index_sees_in_another_shard_is_named(tmp_path: Path) -> None:
    folder, weight_map = sharded(tmp_path / "m")
    first, second = sorted(set(weight_map.values()))[:2]
    tensor = next(name for name, file in weight_map.items() if file == first)
    write_index(folder, weight_map | {tensor: second})
    with pytest.raises(CheckpointError, match=rf"their shards lack: {re.escape(tensor)} \(in {re.escape(second)}\)"):
        Engine(folder, device="cpu")


def test_a_file_beside_the_index_is_left_aside(
    tmp_path: Path, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Other sizes of shards, or consolidated.safetensors, lie beside the shards that count."""
    folder, _ = sharded(tmp_path / "m")
    wanted = make_engine(folder, device="cpu").generate([[1, 2, 3]], GREEDY)[0].token_ids
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "consolidated.safetensors")
    with caplog.at_level(logging.INFO, "pegboard"):
        engine = make_engine(folder, device="cpu")
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == wanted
    assert "does not name consolidated.safetensors" in caplog.text


def test_a_tensor_that_the_index_does_not_name_is_told(
    tmp_path: Path, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    folder, weight_map = sharded(tmp_path / "m")
    file = sorted(set(weight_map.values()))[0]
    save_file(load_file(folder / file) | {"extra": torch.zeros(2)}, folder / file, metadata={"format": "pt"})
    engine = make_engine(folder, device="cpu")
    assert "1 tensors of the shards are not named by the index and are no part of the model: extra" in caplog.text
    assert engine.unused_tensors == ()


# -- what does not fit, and what is left over


def test_all_missing_and_misshapen_tensors_are_named_at_once(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    missing, misshapen = [], []

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(tensors):
            if ".mlp." in name or "input_layernorm" in name:
                del tensors[name]
                missing.append(name)
            elif "self_attn" in name or name == "model.norm.weight":
                tensors[name] = tensors[name][:-1]
                misshapen.append(name)

    change_tensors(folder, damage)
    with pytest.raises(CheckpointError) as caught:
        Engine(folder, device="cpu")
    assert (len(missing), len(misshapen)) == (12, 13)
    for name in missing:
        assert f"missing tensor {name}" in str(caught.value)
    for name in misshapen:
        assert name in str(caught.value)


def test_unused_tensors_are_told_and_kept(
    tmp_path: Path, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Eight by name in the log, all of them in the engine and in its event; buffers of old checkpoints are none."""

    class Watcher:
        ready: EngineReady | None = None

        @hookimpl
        def pegboard_engine_ready(self, event: EngineReady) -> None:
            Watcher.ready = event

    folder = tiny_model(tmp_path / "m")
    extra = tuple(f"model.layers.0.self_attn.q_proj.extra_{i:02}" for i in range(9))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: torch.zeros(2) for name in extra}
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    change_tensors(folder, add)
    engine = make_engine(folder, device="cpu", watchers=[Watcher()])
    assert "9 tensors of the checkpoint are not used by the model" in caplog.text
    assert extra[7] in caplog.text
    assert extra[8] not in caplog.text
    assert engine.unused_tensors == extra
    assert Watcher.ready is not None
    assert Watcher.ready.unused_tensors == extra
    assert make_engine(tiny_model(tmp_path / "clean"), device="cpu").unused_tensors == ()


# -- memory


def anonymous() -> int:
    """Bytes of this process that belong to no file."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def mapped(file: Path) -> tuple[int, int, int]:
    """(mappings, resident bytes, bytes of them that are copies) of a file."""
    found, inside, resident, copied = 0, False, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
            found += inside
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
        elif inside and line.startswith("Private_Dirty:"):
            copied += int(line.split()[1]) * 1024
    return found, resident, copied


@pytest.mark.supports("Files", "weights that nothing converts stay mapped, shared by engines on a CPU")
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_engines_share_the_file(tmp_path: Path, make_engine: Callable[..., Engine], dtype: str) -> None:
    """All but q, k and v, which are joined: gate and up lie one behind the other in the file, as in most."""
    folder = tiny_model(
        tmp_path / "m", hidden_size=512, intermediate_size=2048, num_attention_heads=8, vocab_size=4000, dtype=dtype
    )
    file = folder / "model.safetensors"
    total = file.stat().st_size
    joined = 3 * (512 + 2 * 128) * 512 * (2 if dtype == "bfloat16" else 4)
    settings = {"device": "cpu", "dtype": dtype, "kv_memory": "2MB", "max_length": 64, "max_rows": 1}
    settings["quantizer"] = {"use": "none", "options": {"pack": False}}
    first = make_engine(folder, **settings)
    wanted = first.generate([[1, 2, 3]], GREEDY)[0].raise_for_error().token_ids
    before = anonymous()
    second = make_engine(folder, **settings)
    assert second.generate([[1, 2, 3]], GREEDY)[0].raise_for_error().token_ids == wanted
    grown = anonymous() - before
    found, resident, copied = mapped(file)
    assert found == 2
    assert copied == 0
    assert resident > 1.5 * (total - joined)
    assert grown < joined + 6e6 < total - 6e6


# -- dtype


def test_a_float32_file_runs_in_bfloat16(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    """As the same weights that were stored so."""
    wide = tiny_model(tmp_path / "wide")
    narrow = tiny_model(tmp_path / "narrow")
    change_tensors(narrow, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    ids, sizes = [], []
    for folder in (wide, narrow):
        engine = make_engine(folder, device="cpu", dtype="bfloat16")
        ids.append(engine.generate([[1, 2, 3]], GREEDY)[0].raise_for_error().token_ids)
        sizes.append(engine._phases.executor.memory().weights)
    assert ids[0] == ids[1]
    assert sizes[0] == sizes[1]
    plain = {"use": "none", "options": {"pack": False}}
    assert sizes[0] * 2 == make_engine(wide, device="cpu", quantizer=plain)._phases.executor.memory().weights


class Named:
    def __init__(self, **config: Any) -> None:
        self.config = config


@pytest.mark.parametrize(
    ("config", "device", "wanted"),
    [
        ({"dtype": "float16"}, "cuda", "float16"),
        ({"torch_dtype": "bfloat16"}, "cuda", "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "cuda", "float32"),
        ({}, "cuda", "bfloat16"),
        ({"dtype": "int8"}, "cuda", "bfloat16"),
        ({"dtype": "bfloat16"}, "cpu", "float32"),
    ],
)
def test_auto_follows_the_checkpoint_on_a_gpu_and_is_float32_on_a_cpu(
    config: dict[str, Any], device: str, wanted: str
) -> None:
    facts = DeviceFacts(type=device, index=0, capability=(9, 0) if device == "cuda" else None)
    assert choose_dtype("auto", Named(**config), facts) == wanted  # type: ignore[arg-type]
    assert choose_dtype("float64", Named(**config), facts) == "float64"  # type: ignore[arg-type]
