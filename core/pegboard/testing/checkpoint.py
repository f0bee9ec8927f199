"""Conformance of checkpoint readers: the values that were written, in parts and whole, and an error for all else."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TokenizerFiles
from pegboard.errors import CheckpointError

from .conformance import Candidate, Suite, check, normal, same_bits
from .raising import raises

#: config.json of the model that is written: one layer of a Llama.
CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
)

_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.k_proj.weight": (32, 64),
        "model.layers.0.self_attn.v_proj.weight": (32, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.post_attention_layernorm.weight": (64,),
        "model.layers.0.mlp.gate_proj.weight": (96, 64),
        "model.layers.0.mlp.up_proj.weight": (96, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 96),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }
)


class CheckpointSuite(Suite, standard=True):
    """A reader against `pegboard.contracts.checkpoint`.

    A subclass overrides `write`, which makes files of the format; and `stored`, where the format does not keep the
    numbers that it is given. Features: "blocks" (some tensors are stored in blocks, and `read_blocks` gives them)."""

    role = "checkpoint"
    features = ("blocks",)
    axes: ClassVar[Mapping[str, str]] = {}

    #: Declared: parts of the names of tensors whose numbers a read must put into another order, so copies.
    rearranged: ClassVar[tuple[str, ...]] = ()

    def write(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        """Write tensors by their Hugging Face names, and the config, below the folder `path` (it exists); what to
        open, a file or the folder. Called with other vocabularies, too, for larger files."""
        raise NotImplementedError(f"{type(self).__name__} must override write")

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """What `read(name)` must give for the tensor that was written: itself, or what the format made of it, by the
        format's own reference code (blocks: float32)."""
        return tensor

    def blocks(self, name: str, tensor: Tensor) -> Tensor | None:
        """With "blocks": the uint8 [rows, bytes a row] that `read_blocks` must give; None: not stored in blocks."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """What is written: the float32 tensors of a Llama of one layer."""
        return {name: normal(*shape, seed=i).float() for i, (name, shape) in enumerate(_SHAPES.items())}

    # -- what tests are given

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        return self.write(folder, self.tensors(), CONFIG)

    @pytest.fixture
    def open(self, candidate: Candidate) -> Iterator[Callable[[Path], Checkpoint]]:
        """open(path): a reader that is closed when the test ends."""
        made: list[Checkpoint] = []

        def start(path: Path) -> Checkpoint:
            made.append(candidate.factory.open(path))
            return made[-1]

        yield start
        for checkpoint in made:
            checkpoint.close()

    @pytest.fixture
    def expected(self) -> dict[str, Tensor]:
        """Name -> what `read` must give."""
        return {name: self.stored(name, tensor) for name, tensor in self.tensors().items()}

    # -- values ------------------------------------------------------------------------------------------------------

    def test_tensors_are_what_was_written(
        self, open: Callable[[Path], Checkpoint], path: Path, expected: dict[str, Tensor]
    ) -> None:
        """Names, shapes, and every bit, as stored."""
        checkpoint = open(path)
        infos = checkpoint.tensors()
        check(set(infos) == set(expected), f"lists {sorted(infos)}, written were {sorted(expected)}")
        for name, tensor in expected.items():
            info = infos[name]
            check(info.name == name, f"{name} calls itself {info.name}")
            check(info.shape == tuple(tensor.shape), f"{name} has shape {info.shape}, written {tuple(tensor.shape)}")
            check(info.nbytes > 0 and bool(info.storage), f"{name}: {info}")
            check(same_bits(checkpoint.read(name), tensor), f"{name} has other values, or another dtype")

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    def test_conversion_is_torchs(
        self, open: Callable[[Path], Checkpoint], path: Path, expected: dict[str, Tensor], dtype: str
    ) -> None:
        checkpoint = open(path)
        for name, tensor in expected.items():
            found = checkpoint.read(name, dtype=dtype)
            check(same_bits(found, tensor.to(getattr(torch, dtype))), f"{name} in {dtype} is not torch's conversion")

    def test_parts_are_those_of_the_whole(
        self, open: Callable[[Path], Checkpoint], path: Path, expected: dict[str, Tensor]
    ) -> None:
        """A shard reads its rows or columns only: any range along any dimension, with and without conversion."""
        checkpoint = open(path)
        for name, tensor in expected.items():
            for dim, size in enumerate(tensor.shape):
                for start, length in ((0, size), (0, 0), (5, 7), (size // 2, size // 2), (size - 1, 1), (31, 2)):
                    if start + length > size:
                        continue
                    wanted = tensor.narrow(dim, start, length)
                    for asked in (None, "bfloat16"):
                        found = checkpoint.read(name, dtype=asked, dim=dim, start=start, length=length)
                        right = wanted if asked is None else wanted.bfloat16()
                        check(same_bits(found, right), f"{name}: [{start}, {start + length}) along {dim} as {asked}")
                rest = checkpoint.read(name, dim=dim, start=size // 2)
                check(same_bits(rest, tensor.narrow(dim, size // 2, size - size // 2)), f"{name}: all from the middle")

    def test_plain_numbers_are_views(self, open: Callable[[Path], Checkpoint], path: Path) -> None:
        """What needs no conversion is not copied: two reads give the same memory."""
        checkpoint = open(path)
        plain = [n for n, info in checkpoint.tensors().items() if hasattr(torch, info.storage)]
        plain = [name for name in plain if not any(part in name for part in self.rearranged)]
        if not plain:
            pytest.skip("nothing is stored as plain numbers")
        for name in plain:
            one, other = checkpoint.read(name), checkpoint.read(name)
            check(one.data_ptr() == other.data_ptr(), f"{name} is copied by every read")

    def test_blocks_come_as_stored(
        self, open: Callable[[Path], Checkpoint], path: Path, expected: dict[str, Tensor]
    ) -> None:
        """uint8 [rows, bytes a row], in the order of `read`; what is not in blocks is refused."""
        checkpoint = open(path)
        found = 0
        for name, tensor in self.tensors().items():
            blocks = self.blocks(name, tensor)
            if blocks is None:
                try:
                    checkpoint.read_blocks(name)
                except (CheckpointError, NotImplementedError):
                    continue
                check(False, f"{name} is not stored in blocks, and read_blocks gives some")
            else:
                found += 1
                check(same_bits(checkpoint.read_blocks(name), blocks), f"{name} has other blocks")
        check(found > 0 or "blocks" not in self.claims, 'claims "blocks", and `blocks` gives none to compare with')

    def test_config_speaks_the_hugging_face_dialect(self, open: Callable[[Path], Checkpoint], path: Path) -> None:
        checkpoint = open(path)
        config = checkpoint.config
        for key, value in CONFIG.items():
            if isinstance(value, float):
                right = abs(float(config.get(key, "nan")) - value) < 1e-6 * abs(value)
            else:
                right = config.get(key) == value
            # What is false or absent means the same.
            check(right or (not value and not config.get(key)), f"{key} is {config.get(key)!r}, written {value!r}")
        check(isinstance(checkpoint.generation, Mapping), f"generation is {checkpoint.generation!r}")
        check(isinstance(checkpoint.tokenizer, TokenizerFiles), f"tokenizer is {checkpoint.tokenizer!r}")

    # -- wrong questions ---------------------------------------------------------------------------------------------

    def test_unknown_names_are_errors_that_say_so(self, open: Callable[[Path], Checkpoint], path: Path) -> None:
        """With the name and the file."""
        checkpoint = open(path)
        for name in ("model.norm.wieght", "", "model"):
            error = str(raises(CheckpointError, partial(checkpoint.read, name), f"read({name!r})"))
            told = name in error and (path.name in error or path.parent.name in error)
            check(told, f"read({name!r}): the error names not both tensor and file: {error}")

    @pytest.mark.parametrize(
        "part",
        [{"start": 65}, {"start": -1}, {"length": 65}, {"start": 60, "length": 5}, {"dim": 2}, {"length": -1}],
        ids=str,
    )
    def test_ranges_outside_are_refused(
        self, open: Callable[[Path], Checkpoint], path: Path, part: dict[str, Any]
    ) -> None:
        """Not cut short: a shard would miss rows."""
        name = "model.layers.0.self_attn.q_proj.weight"
        checkpoint = open(path)
        error = str(raises(CheckpointError, lambda: checkpoint.read(name, **part), f"read({part})"))
        check(name in error, f"the error does not name the tensor: {error}")

    def test_unknown_dtypes_are_refused(self, open: Callable[[Path], Checkpoint], path: Path) -> None:
        checkpoint = open(path)
        raises(CheckpointError, lambda: checkpoint.read("model.norm.weight", dtype="float31"), "dtype float31")

    # -- files -------------------------------------------------------------------------------------------------------

    def test_recognises_its_own_files_only(self, candidate: Candidate, path: Path, tmp_path: Path) -> None:
        """By names and magic bytes, and never raises."""
        check(candidate.factory.recognises(path), f"{path.name} is not recognised")
        empty, text, noise = tmp_path / "empty", tmp_path / "notes.txt", tmp_path / "noise.data"
        empty.mkdir()
        text.write_text("a text")
        noise.write_bytes(Random(0).randbytes(4096))
        for other in (empty, text, noise, tmp_path / "missing"):
            check(not candidate.factory.recognises(other), f"{other.name} is taken for a checkpoint")

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
    def test_files_that_end_early_are_refused(
        self, candidate: Candidate, path: Path, tmp_path: Path, share: float
    ) -> None:
        """At `open`, not in the middle of loading, with the file's name."""
        damaged, file = _copy(path, tmp_path)
        with file.open("r+b") as handle:
            handle.truncate(int(file.stat().st_size * share))
        error = str(raises(CheckpointError, lambda: candidate.factory.open(damaged), f"a file cut to {share:.1%}"))
        check(file.name in error or damaged.name in error, f"the error does not name the file: {error}")

    def test_what_is_missing_is_an_error(self, candidate: Candidate, path: Path, tmp_path: Path) -> None:
        absent = tmp_path / "nowhere" / path.name
        raises(CheckpointError, lambda: candidate.factory.open(absent), "a path where nothing is")

    def test_damage_is_never_another_error(self, candidate: Candidate, path: Path, tmp_path: Path) -> None:
        """A header with wrong bytes is a CheckpointError or goes unnoticed; nothing else is raised, and no read goes
        beyond the file."""
        damaged, file = _copy(path, tmp_path)
        whole, random = file.read_bytes(), Random(0)
        for turn in range({"small": 20, "normal": 150, "full": 3000}[self.grid]):
            data = bytearray(whole)
            for _ in range(random.choice([1, 1, 4])):
                place = random.randrange(min(len(data), random.choice([16, 64, 2048])))
                data[place] = random.choice([0, 255, data[place] ^ (1 << random.randrange(8))])
            file.write_bytes(data)
            try:
                checkpoint = candidate.factory.open(damaged)
                try:
                    for name in checkpoint.tensors():
                        checkpoint.read(name)
                finally:
                    checkpoint.close()
            except CheckpointError:
                continue
            except Exception as error:
                raise AssertionError(f"damage {turn}: {type(error).__name__} instead of CheckpointError") from error

    def test_the_file_is_never_written(self, open: Callable[[Path], Checkpoint], path: Path) -> None:
        """Not by reading, and not by a stray write into what was read."""
        before = _digests(path)
        checkpoint = open(path)
        for name in checkpoint.tensors():
            for dtype in (None, "bfloat16"):
                checkpoint.read(name, dtype=dtype)
        check(_digests(path) == before, "reading changes the file")
        for name in checkpoint.tensors():
            try:
                checkpoint.read(name).add_(1)
            except RuntimeError:  # a reader may give what can't be written
                continue
        checkpoint.close()
        check(_digests(path) == before, "a write into a tensor that was read reaches the file")

    def test_listing_reads_no_data(self, candidate: Candidate, tmp_path: Path) -> None:
        """Names, shapes and config of a file of any size come from its header: what is touched is counted (Linux)."""
        if not Path("/proc/self/io").exists():
            pytest.skip("needs Linux's /proc to count what is read")
        rows = 1 << 16
        tensors = self.tensors()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.zeros(rows, 64)
        folder = tmp_path / "large"
        folder.mkdir()
        path = self.write(folder, tensors, {**CONFIG, "vocab_size": rows})
        size = sum(file.stat().st_size for file in _files(path))
        before = _bytes_read()
        checkpoint = candidate.factory.open(path)
        try:
            shape = checkpoint.tensors()["lm_head.weight"].shape
            check(shape == (rows, 64), f"lm_head.weight has shape {shape}, written {(rows, 64)}")
            touched = _bytes_read() - before + sum(map(_bytes_mapped, _files(path)))
        finally:
            checkpoint.close()
        check(touched < size / 8, f"{touched} of {size} bytes were touched to list the tensors")

    def test_close_gives_the_files_back(self, candidate: Candidate, path: Path) -> None:
        """Twice is fine; then reading is an error. Tensors that are alive stay good, and hold what they need."""
        checkpoint = candidate.factory.open(path)
        view = checkpoint.read("model.norm.weight")
        right = view.clone()
        checkpoint.close()
        checkpoint.close()
        raises(CheckpointError, partial(checkpoint.read, "model.norm.weight"), "read after close")
        check(same_bits(view, right), "a tensor changed when its checkpoint was closed")
        del view, checkpoint
        gc.collect()
        left = [str(file) for file in _files(path) if _is_open(file)]
        check(not left, f"still open or mapped: {left}")

    def test_what_is_refused_is_let_go(self, candidate: Candidate, path: Path, tmp_path: Path) -> None:
        damaged, file = _copy(path, tmp_path)
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
        raises(CheckpointError, lambda: candidate.factory.open(damaged), "half a file")
        gc.collect()
        left = [str(f) for f in _files(damaged) if _is_open(f)]
        check(not left, f"still open or mapped after it was refused: {left}")


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _copy(path: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the checkpoint, and its largest file."""
    target = tmp_path / "damaged" / path.name
    target.parent.mkdir()
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copytree(path.parent, target.parent, dirs_exist_ok=True)
    return target, max(_files(target), key=lambda file: file.stat().st_size)


def _digests(path: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in _files(path)}


def _bytes_read() -> int:
    """By this process, through read calls."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _bytes_mapped(file: Path) -> int:
    """Of the file, in memory through maps of this process."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024 * ours
        elif "-" in line.split()[0]:
            ours = line.endswith(str(file))
    return total


def _is_open(file: Path) -> bool:
    if not Path("/proc/self/maps").exists():
        return False
    path = str(file.resolve())
    handles = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return path in handles or path in Path("/proc/self/maps").read_text()
