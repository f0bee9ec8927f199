"""Weights go from files to the device in parts, and are the file's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.checkpoints import device_reads
from pegboard.checkpoints.device_reads import DeviceReads
from pegboard.checkpoints.safetensors import SafetensorsCheckpoint
from pegboard.errors import CheckpointError

pytestmark = pytest.mark.gpu


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    torch.manual_seed(0)
    save_file(
        {
            "odd": torch.randint(0, 255, (3,), dtype=torch.uint8),
            "large": torch.randn(2311, 4099).bfloat16(),
            "small": torch.randn(7),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path


@pytest.mark.supports("On a GPU", "safetensors straight to the device")
@pytest.mark.parametrize("part", [1 << 16, device_reads._PART])
def test_what_is_read_is_what_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(device_reads, "_PART", part)
    checkpoint = SafetensorsCheckpoint.open(folder)
    for name in ("odd", "large", "small"):
        assert torch.equal(checkpoint.read(name, device="cuda:0").cpu(), checkpoint.read(name))
    rows = checkpoint.read("large", device="cuda:0", start=301, length=1500, dtype="float32")
    assert torch.equal(rows.cpu(), checkpoint.read("large", start=301, length=1500, dtype="float32"))
    columns = checkpoint.read("large", device="cuda:0", dim=1, start=17, length=1000)
    assert torch.equal(columns.cpu(), checkpoint.read("large", dim=1, start=17, length=1000))
    checkpoint.close()


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(1 << 20))
    reads = DeviceReads("cuda:0")
    with pytest.raises(CheckpointError, match="ends at 1048576, 1048576 bytes early"):
        reads.read(tmp_path / "short", 0, torch.empty(2 << 20, dtype=torch.uint8, device="cuda:0"))
    reads.close()
