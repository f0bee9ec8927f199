"""Checkpoints: named tensors and a config, whatever the file format. Names and config follow the Hugging Face
dialect ("model.layers.0.self_attn.q_proj.weight"); a reader of another format translates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    #: Logical shape, after any unpacking by the format itself (GGUF blocks).
    shape: tuple[int, ...]
    #: torch's dtype name, or the format's own block type, e.g. "Q4_1".
    storage: str
    #: Bytes in the file.
    nbytes: int


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer can be built from: the path of a fast tokenizer.json, metadata of a GGUF file, or a vocabulary
    with merges where `config` names a class that is known."""

    tokenizer_json: Path | None = None
    #: vocab.json and merges.txt.
    vocabulary: tuple[Path, Path] | None = None
    #: Other tokenizer files, which are not read (tokenizer.model, ...), for advice.
    unread: tuple[Path, ...] = ()
    #: tokenizer_config.json, or {} (chat_template, bos_token, eos_token, ...)
    config: Mapping[str, Any] = {}
    #: GGUF: tokens, merges, token types and special ids, by their metadata keys; arrays are lists.
    gguf: Mapping[str, Any] | None = None


class Checkpoint(ABC):
    """Read-only access to one model. Files stay memory-mapped until `close`.

    Errors: CheckpointError naming the file, for what is missing, truncated or of an unknown kind.
    """

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Whether `path` (a file or a folder) is of this format. Looks at names and magic bytes only."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path) -> Self:
        """Read headers and config, check that every file is whole, map the tensors."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """config.json, or its equivalent: `architectures`, `hidden_size`, ..., `quantization_config` if any."""

    @property
    @abstractmethod
    def generation(self) -> Mapping[str, Any]:
        """generation_config.json or {}: EOS ids and sampling defaults."""

    @property
    @abstractmethod
    def tokenizer(self) -> TokenizerFiles: ...

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @abstractmethod
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
        """The dense values, dequantised if stored in blocks, narrowed to [start, start + length) along `dim` (a
        shard reads its part only). Without conversion on CPU it is a view of the mapped file, not to be written.
        dtype None: as stored (blocks: float32)."""

    def read_blocks(self, name: str) -> Tensor:
        """The stored blocks as uint8 [rows, bytes a row], rows in the order of `read`, leading dimensions flattened.

        For quantizers that keep them."""
        raise NotImplementedError(f"{type(self).__name__} stores no blocks")

    @abstractmethod
    def close(self) -> None: ...


class CheckpointNeed(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    #: Names that a model asked for, for messages about what is missing or unused.
    wanted: Sequence[str] = ()
