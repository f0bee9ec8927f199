"""Broken readers, one for each rule: the suite catches every one of them, by the test that states the rule."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from pegboard.checkpoints.safetensors import SafetensorsCheckpoint
from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.errors import CheckpointError
from pegboard.testing.checkpoint import CheckpointSuite
from pegboard.testing.conformance import run_suite


class Folder(CheckpointSuite):
    def write(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        (path / "config.json").write_text(json.dumps(dict(config)))
        save_file(dict(tensors), path / "model.safetensors")
        return path


class Transposes(SafetensorsCheckpoint):
    """Rows of square matrices for columns."""

    def read(self, name: str, **how: Any) -> Tensor:
        if name.endswith("o_proj.weight"):
            whole = super().read(name, dtype=how.get("dtype")).T.contiguous()
            dim, start, length = how.get("dim", 0), how.get("start", 0), how.get("length")
            return whole.narrow(dim, start, whole.shape[dim] - start if length is None else length)
        return super().read(name, **how)


class Loses(SafetensorsCheckpoint):
    """Does not list what it takes for a buffer."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: info for name, info in super().tensors().items() if "norm" not in name}


class Rounds(SafetensorsCheckpoint):
    """Converts by way of bfloat16."""

    def read(self, name: str, *, dtype: str | None = None, **how: Any) -> Tensor:
        found = super().read(name, **how)
        return found if dtype is None else found.bfloat16().to(getattr(torch, dtype))


class OneOff(SafetensorsCheckpoint):
    """Parts of columns begin a column late."""

    def read(self, name: str, **how: Any) -> Tensor:
        if how.get("dim") == 1 and how.get("start") and how.get("length"):
            how["start"] = min(how["start"] + 1, self.tensors()[name].shape[1] - how["length"])
        return super().read(name, **how)


class Copies(SafetensorsCheckpoint):
    def read(self, name: str, **how: Any) -> Tensor:
        return super().read(name, **how).clone()


class MakesBlocks(SafetensorsCheckpoint):
    def read_blocks(self, name: str) -> Tensor:
        return super().read(name).view(torch.uint8)


class OwnDialect(SafetensorsCheckpoint):
    @property
    def config(self) -> Mapping[str, Any]:
        return {f"llama.{key}": value for key, value in super().config.items()}


class Guesses(SafetensorsCheckpoint):
    """Takes the nearest name."""

    def read(self, name: str, **how: Any) -> Tensor:
        return super().read(name if name in self.tensors() else "model.norm.weight", **how)


class BareErrors(SafetensorsCheckpoint):
    """Says no more than that something is missing."""

    def read(self, name: str, **how: Any) -> Tensor:
        if name not in self.tensors():
            raise CheckpointError("no such tensor")
        return super().read(name, **how)


class Clips(SafetensorsCheckpoint):
    """As much of a range as there is."""

    def read(self, name: str, **how: Any) -> Tensor:
        size = self.tensors()[name].shape[0] if name in self.tensors() else 0
        if how.get("dim", 0) == 0 and how.get("length") and how["length"] > size - how.get("start", 0):
            how["length"] = size - how.get("start", 0)
        return super().read(name, **how)


class AnyDtype(SafetensorsCheckpoint):
    def read(self, name: str, *, dtype: str | None = None, **how: Any) -> Tensor:
        known = dtype if dtype is None or hasattr(torch, dtype) else None
        return super().read(name, dtype=known, **how)


class Grabs(SafetensorsCheckpoint):
    """Takes any file for its own."""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_file() or super().recognises(path)


class Trusts(SafetensorsCheckpoint):
    """Fills up files that end early."""

    @classmethod
    def open(cls, path: Path) -> Self:
        file = path / "model.safetensors"
        if file.exists() and file.stat().st_size > 8:
            length = struct.unpack("<Q", file.read_bytes()[:8])[0]
            if file.stat().st_size > 8 + length:
                header = json.loads(file.read_bytes()[8 : 8 + length])
                end = max(info["data_offsets"][1] for name, info in header.items() if name != "__metadata__")
                with file.open("r+b") as handle:
                    handle.truncate(8 + length + end)
        return super().open(path)


class Raises(SafetensorsCheckpoint):
    """Reads the header with no care."""

    @classmethod
    def open(cls, path: Path) -> Self:
        file = path / "model.safetensors"
        if file.exists() and file.stat().st_size > 8:
            data = file.read_bytes()
            length = min(struct.unpack("<Q", data[:8])[0], len(data))
            data[8 : 8 + length].decode()
        return super().open(path)


class Absent(SafetensorsCheckpoint):
    @classmethod
    def open(cls, path: Path) -> Self:
        list(path.iterdir())
        return super().open(path)


class WritesBack(SafetensorsCheckpoint):
    """A mapping that is shared with the file."""

    def read(self, name: str, **how: Any) -> Tensor:
        file, stored = self._stored.get(name, (None, None))
        if file is None or stored is None or how.get("dtype") or len(how) or file._map is None:
            return super().read(name, **how)
        shared = torch.from_file(str(file.path), shared=True, size=file.size, dtype=torch.uint8)
        return shared[stored.offset : stored.offset + stored.nbytes].view(stored.dtype).view(stored.shape)


class ReadsAll(SafetensorsCheckpoint):
    """Loads everything to be ready for all questions."""

    @classmethod
    def open(cls, path: Path) -> Self:
        made = super().open(path)
        for name in made.tensors():
            made.read(name).sum()
        return made


class StaysOpen(SafetensorsCheckpoint):
    """Has one file more, for later."""

    @classmethod
    def open(cls, path: Path) -> Self:
        made = super().open(path)
        LATER.append((path / "model.safetensors").open("rb"))
        return made


class Reads(SafetensorsCheckpoint):
    """Goes on after `close`."""

    def close(self) -> None:
        self.closed = True

    def read(self, name: str, **how: Any) -> Tensor:
        return super().read(name, **how)


class Clings(SafetensorsCheckpoint):
    """Keeps a file that it refuses."""

    @classmethod
    def open(cls, path: Path) -> Self:
        try:
            return super().open(path)
        except CheckpointError:
            if (path / "model.safetensors").exists():
                LATER.append((path / "model.safetensors").open("rb"))
            raise


class Misshapen(SafetensorsCheckpoint):
    """Lists sizes as the file's own format orders them."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: replace(info, shape=info.shape[::-1]) for name, info in super().tensors().items()}


LATER: list[Any] = []

#: The rule's own test, then others that see it, too.
BROKEN: dict[type[Checkpoint], str] = {
    Transposes: (
        "test_tensors_are_what_was_written test_conversion_is_torchs test_parts_are_those_of_the_whole "
        "test_plain_numbers_are_views"
    ),
    Loses: "test_tensors_are_what_was_written",
    Misshapen: "test_tensors_are_what_was_written test_listing_reads_no_data",
    Rounds: "test_conversion_is_torchs test_unknown_dtypes_are_refused",
    OneOff: "test_parts_are_those_of_the_whole",
    Copies: "test_plain_numbers_are_views",
    MakesBlocks: "test_blocks_come_as_stored",
    OwnDialect: "test_config_speaks_the_hugging_face_dialect",
    Guesses: "test_unknown_names_are_errors_that_say_so",
    BareErrors: "test_unknown_names_are_errors_that_say_so",
    Clips: "test_ranges_outside_are_refused",
    AnyDtype: "test_unknown_dtypes_are_refused",
    Grabs: "test_recognises_its_own_files_only",
    Trusts: (
        "test_files_that_end_early_are_refused test_what_is_refused_is_let_go test_damage_is_never_another_error "
        "test_listing_reads_no_data"
    ),
    Raises: "test_damage_is_never_another_error test_listing_reads_no_data",
    Absent: "test_what_is_missing_is_an_error",
    WritesBack: "test_the_file_is_never_written test_plain_numbers_are_views",
    ReadsAll: "test_listing_reads_no_data",
    StaysOpen: "test_close_gives_the_files_back",
    Reads: "test_close_gives_the_files_back",
    Clings: "test_what_is_refused_is_let_go",
}


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    yield
    while LATER:
        LATER.pop().close()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught_by_its_test(broken: type[Checkpoint]) -> None:
    """And by no other than those that the table names: with PEGBOARD_FULL the whole suite is run for that."""
    own, *others = BROKEN[broken].split()
    full = bool(os.environ.get("PEGBOARD_FULL"))
    suite = type("Broken", (Folder,), {"part": broken, "grid": "normal"})
    failed = {outcome.test for outcome in run_suite(suite, "" if full else own) if outcome.result == "failed"}
    assert failed == ({own, *others} if full else {own})
