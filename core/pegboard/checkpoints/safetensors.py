"""Model folders of the Hugging Face layout: config.json beside one safetensors file, or several with an index.

The index decides: a tensor that a shard holds but the index does not name is no part of the model and is not
listed by `tensors`; one that the index names must be in the shard it names, and in no other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from pegboard.errors import CheckpointError

from .device_reads import WORTH, DeviceReads
from .mapped import MappedFile, as_dtype
from .narrowing import find_tensor, resolve_range, torch_dtype
from .safetensors_header import StoredTensor, read_header

logger = logging.getLogger("pegboard")

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Files of tokenizers that are no tokenizer.json.
_UNREAD = ("*.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json", "*.tiktoken")


class SafetensorsCheckpoint(Checkpoint):
    """Opened from the folder, or from the weight file or index in it."""

    def __init__(self, folder: Path, files: Mapping[str, MappedFile], index: Mapping[str, str] | None) -> None:
        self._folder = folder
        self._files = files
        #: Once something was read to a CUDA device.
        self._reads: DeviceReads | None = None
        self._config = _read_object(folder / "config.json")
        self._generation = _read_object(folder / "generation_config.json", optional=True)
        self._stored: dict[str, tuple[MappedFile, StoredTensor]] = {}
        for name, (file, tensor) in _collect(files, index).items():
            self._stored[name] = (files[file], tensor)
        self._infos = {
            name: TensorInfo(name=name, shape=s.shape, storage=str(s.dtype).removeprefix("torch."), nbytes=s.nbytes)
            for name, (_, s) in self._stored.items()
        }

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """A safetensors file or index, or a folder with one; also a folder that has a config.json and no GGUF file,
        so that `open` can say what is missing there."""
        if path.is_dir():
            return any(path.glob("*.safetensors")) or (
                (path / "config.json").is_file() and not any(path.glob("*.gguf"))
            )
        return path.name.endswith((".safetensors", ".safetensors.index.json"))

    @classmethod
    def open(cls, path: Path) -> Self:
        folder, names, index = _locate(path)
        files: dict[str, MappedFile] = {}
        try:
            for name in names:
                files[name] = MappedFile(folder / name)
            return cls(folder, files, index)
        except BaseException:
            for file in files.values():
                file.close()
            raise

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def generation(self) -> Mapping[str, Any]:
        return self._generation

    @property
    def tokenizer(self) -> TokenizerFiles:
        """chat_template.jinja, and named templates in additional_chat_templates/, override tokenizer_config.json."""
        fast = self._folder / "tokenizer.json"
        config = _read_object(self._folder / "special_tokens_map.json", optional=True)
        config |= _read_object(self._folder / "tokenizer_config.json", optional=True)
        templates = {"default": self._folder / "chat_template.jinja"}
        templates |= {file.stem: file for file in (self._folder / "additional_chat_templates").glob("*.jinja")}
        texts = {name: _read_text(file) for name, file in templates.items() if file.is_file()}
        if texts:
            config["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        vocabulary = self._folder / "vocab.json", self._folder / "merges.txt"
        whole = all(path.is_file() for path in vocabulary)
        found = {path for pattern in _UNREAD for path in self._folder.glob(pattern)}
        return TokenizerFiles(
            tokenizer_json=fast if fast.is_file() else None,
            vocabulary=vocabulary if whole else None,
            unread=tuple(sorted(found - (set(vocabulary) if whole else set()))),
            config=config,
        )

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(
        self,
        name: str,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        dim: int = 0,
        start: int = 0,
        length: int | None = None,
    ) -> Tensor:
        info = find_tensor(self._infos, name, self._folder)
        file, stored = self._stored[name]
        values = whole = as_dtype(file.tensor(stored.offset, stored.nbytes), stored.dtype, stored.shape)
        dim, start, length = resolve_range(info, dim, start, length)
        if stored.shape:
            values = values.narrow(dim, start, length)
        wanted = torch_dtype(dtype) if dtype else stored.dtype
        if wanted.is_floating_point and not stored.dtype.is_floating_point:
            raise CheckpointError(
                f"{file.path}: {name} holds whole numbers ({info.storage}) where weights of a float type are expected; "
                "a quantized checkpoint says so in the quantization_config of its config.json"
            )
        if values.nbytes < WORTH or not values.is_contiguous() or not DeviceReads.possible(device):
            return values.to(device).to(wanted)
        if self._reads is None:
            self._reads = DeviceReads(device)
        target = torch.empty(values.shape, dtype=stored.dtype, device=device)
        offset = stored.offset + values.data_ptr() - whole.data_ptr()
        self._reads.read(file.path, offset, target.view(-1).view(torch.uint8))
        return target.to(wanted)

    def close(self) -> None:
        if self._reads is not None:
            self._reads.close()
            self._reads = None
        for file in self._files.values():
            file.close()


def _locate(path: Path) -> tuple[Path, list[str], Mapping[str, str] | None]:
    """Folder, the weight files to open, and the index's map of tensors to files, if there is one."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir():
        folder = path
        found = sorted(file.name for file in path.glob("*.safetensors"))
        if _SINGLE in found:
            return folder, [_SINGLE], None
        if not (path / _INDEX).is_file():
            if len(found) == 1:
                return folder, found, None
            raise CheckpointError(_what_is_missing(path, found))
        path = path / _INDEX
    folder = path.parent
    if path.suffix == ".safetensors":
        return folder, [path.name], None
    index = _read_object(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to files")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the shard {name!r}; a shard must lie beside its index")
    others = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in names)
    if others:
        logger.info("%s does not name %s: left aside", path, ", ".join(others))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}")
    return folder, names, index


def _what_is_missing(folder: Path, found: list[str]) -> str:
    if found:
        return f"{folder} has {len(found)} safetensors files but neither {_SINGLE} nor {_INDEX}"
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        return (
            f"{folder} has its weights in pickle files only ({pickles[0]}); pickle can run code and is never loaded: "
            "convert them to safetensors, e.g. with save_pretrained(..., safe_serialization=True) of transformers"
        )
    return f"{folder} has no safetensors file; expected {_SINGLE}, or {_INDEX} with its shards"


def _collect(files: Mapping[str, MappedFile], index: Mapping[str, str] | None) -> dict[str, tuple[str, StoredTensor]]:
    """Tensor name -> (file name, place)."""
    found: dict[str, tuple[str, StoredTensor]] = {}
    for file, mapped in files.items():
        for name, tensor in read_header(mapped).items():
            if name in found:
                raise CheckpointError(f"tensor {name!r} is in two shards, {found[name][0]} and {file}")
            found[name] = (file, tensor)
    if index is None:
        return found
    lost = [f"{name} (in {file})" for name, file in index.items() if name not in found or found[name][0] != file]
    if lost:
        raise CheckpointError(f"the index names tensors that their shards lack: {', '.join(lost)}")
    foreign = sorted(found.keys() - index.keys())
    if foreign:
        logger.warning(
            "%d tensors of the shards are not named by the index and are no part of the model: %s",
            len(foreign),
            ", ".join(foreign[:8]) + (", ..." if len(foreign) > 8 else ""),
        )
    return {name: found[name] for name in index}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
