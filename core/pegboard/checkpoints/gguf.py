"""GGUF files, single or split, read as if they were a Hugging Face checkpoint.

Names and config are translated (`gguf_dialect`), sizes are in row-major order, and the rows of q and k, which the
converter interleaved, are put back, as are the weights of norms that it shifted. Blocks are dequantised when they are
read, a part at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from pegboard.errors import CheckpointError

from .gguf_dialect import architecture, make_config, make_generation, translate
from .gguf_header import MAGIC, GGUFHeader, StoredBlocks
from .mapped import MappedFile, as_dtype
from .narrowing import find_tensor, resolve_range, torch_dtype

#: Types that hold plain numbers, and are views of the file.
_PLAIN: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}

#: Elements dequantised at a time: bounds the float32 scratch to 32 MiB, whatever the tensor's size.
_CHUNK = 1 << 23

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


class GGUFCheckpoint(Checkpoint):
    """Opened from the file, from any part of a split one, or from a folder that holds one model."""

    def __init__(self, path: Path, files: Sequence[MappedFile]) -> None:
        self._path = path
        self._files = files
        headers = [GGUFHeader(file) for file in files]
        _check_split(path, headers)
        self._metadata = headers[0].metadata
        self._stored: dict[str, tuple[MappedFile, StoredBlocks]] = {}
        self._architecture = architecture(self._metadata)
        for file, header in zip(files, headers, strict=True):
            for original, stored in header.tensors.items():
                name = translate(original, self._architecture)
                if name in self._stored:
                    raise CheckpointError(f"tensor {original!r} of {file.path} appears twice in the model")
                self._stored[name] = (file, stored)
        self._infos = {
            name: TensorInfo(name=name, shape=s.shape, storage=_storage(s), nbytes=s.nbytes)
            for name, (_, s) in self._stored.items()
        }
        self._config = make_config(self._metadata, {name: info.shape for name, info in self._infos.items()})
        self._check_heads()

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """A file with the suffix or the magic of GGUF, or a folder with .gguf files and no safetensors file."""
        if path.is_dir():
            return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
        if path.suffix == ".gguf":
            return True
        try:
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    @classmethod
    def open(cls, path: Path) -> Self:
        files: list[MappedFile] = []
        try:
            for part in _parts(path):
                files.append(MappedFile(part))
            return cls(path, files)
        except BaseException:
            for file in files:
                file.close()
            raise

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def generation(self) -> Mapping[str, Any]:
        return make_generation(self._metadata)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's own keys and values, untranslated."""
        return self._metadata

    @property
    def tokenizer(self) -> TokenizerFiles:
        found = {key: self._metadata[key] for key in self._metadata if key.startswith("tokenizer.")}
        return TokenizerFiles(gguf=found or None)

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
        info = find_tensor(self._infos, name, self._path)
        file, stored = self._stored[name]
        dim, start, length = resolve_range(info, dim, start, length)
        plain = _PLAIN.get(stored.type)
        wanted = torch_dtype(dtype) if dtype else plain or torch.float32
        if plain is not None:
            numbers = as_dtype(file.tensor(stored.offset, stored.nbytes), plain, stored.shape)
            part = self._part(name, numbers, dim, start, length) if stored.shape else numbers
            if name.endswith("norm.weight") and self._architecture.norm_offset:
                part = part - self._architecture.norm_offset
            return part.to(device).to(wanted)
        blocks = self._blocks(name)
        if dim < blocks.dim() - 1:
            return _dequantise(self._part(name, blocks, dim, start, length), stored, wanted).to(device)
        # Along the row only the blocks that the range touches.
        first, last = start // stored.block, -(-(start + length) // stored.block)
        columns = (first * stored.block_bytes, (last - first) * stored.block_bytes)
        dense = _dequantise(self._part(name, blocks, dim, *columns), stored, wanted)
        return dense.narrow(-1, start - first * stored.block, length).to(device)

    def read_blocks(self, name: str) -> Tensor:
        """uint8 [rows, bytes a row]: the file's own bytes, its rows in the order of `read`. A view of the file, but
        for the interleaved rows of q and k, which are gathered."""
        info = find_tensor(self._infos, name, self._path)
        if self._stored[name][1].type in _PLAIN:
            raise CheckpointError(f"tensor {name} is stored as {info.storage}, not in blocks")
        blocks = self._blocks(name)
        return self._part(name, blocks, 0, 0, blocks.shape[0]).reshape(-1, blocks.shape[-1])

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _blocks(self, name: str) -> Tensor:
        """uint8 [*shape without the last, bytes a row], as the file has it."""
        file, stored = self._stored[name]
        row_bytes = stored.shape[-1] // stored.block * stored.block_bytes
        return file.tensor(stored.offset, stored.nbytes).view(*stored.shape[:-1], row_bytes)

    def _part(self, name: str, values: Tensor, dim: int, start: int, length: int) -> Tensor:
        heads = self._heads(name)
        if heads is None:
            return values.narrow(dim, start, length)
        rows = _original_rows(values.shape[0], heads)
        return values[rows[start : start + length]] if dim == 0 else values.narrow(dim, start, length)[rows]

    def _heads(self, name: str) -> int | None:
        """How many heads' rows are interleaved in this tensor; None: it is as it was."""
        if self._architecture.interleaved and ".self_attn.q_proj." in name:
            return int(self._config["num_attention_heads"])
        if self._architecture.interleaved and ".self_attn.k_proj." in name:
            return int(self._config["num_key_value_heads"])
        return None

    def _check_heads(self) -> None:
        for name, info in self._infos.items():
            rows = (self._heads(name) or 0) * self._config["head_dim"]
            if rows and info.shape[:1] != (rows,):
                raise CheckpointError(
                    f"tensor {name} of {self._path} has shape {info.shape}; its heads need {rows} rows"
                )


def _storage(stored: StoredBlocks) -> str:
    plain = _PLAIN.get(stored.type)
    return str(plain).removeprefix("torch.") if plain is not None else stored.type


def _original_rows(rows: int, heads: int) -> Tensor:
    """[rows] int64: where each row of the original lies. The converter turned each head's (half, pair) into
    (pair, half)."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _dequantise(blocks: Tensor, stored: StoredBlocks, dtype: torch.dtype) -> Tensor:
    """uint8 [..., bytes a row] -> [..., elements] in `dtype`, by the format's own reference."""
    # Imported here: most checkpoints hold no blocks.
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[stored.type]
    width = blocks.shape[-1] // stored.block_bytes * stored.block
    dense = torch.empty(*blocks.shape[:-1], width, dtype=dtype)
    if not dense.numel():
        return dense
    rows, out = blocks.reshape(-1, blocks.shape[-1]), dense.view(-1, width)
    step = max(1, _CHUNK // width)
    for at in range(0, rows.shape[0], step):
        # A damaged scale may be inf or NaN: that is the data's, not a warning's, business.
        with np.errstate(all="ignore"):
            out[at : at + step] = torch.from_numpy(dequantize(rows[at : at + step].numpy(), kind))
    return dense


def _parts(path: Path) -> list[Path]:
    """Every file of the model that `path` names, in order."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        models = {match["stem"] if (match := _SPLIT.match(file.name)) else file.stem for file in found}
        if len(models) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise CheckpointError(
                f"{path} must hold the GGUF file of one model, or name the file itself; it has: {names}"
            )
        path = found[0]
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(f"{path.parent} lacks {len(missing)} of {count} parts: {', '.join(missing)}")
    return parts


def _check_split(path: Path, headers: Sequence[GGUFHeader]) -> None:
    for place, header in enumerate(headers):
        count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if count not in (len(headers), 0) or number != place:
            raise CheckpointError(
                f"{path} says it is part {number} (from 0) of {count}, but stands as part {place} of {len(headers)}; "
                "split files must keep their names, NAME-00001-of-0000N.gguf"
            )
    total = headers[0].metadata.get("split.tensors.count")
    held = sum(len(header.tensors) for header in headers)
    if total is not None and total != held:
        raise CheckpointError(f"{path} and its other parts hold {held} tensors, its header says {total}")
