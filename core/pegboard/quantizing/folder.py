"""Writing a model folder that any reader of safetensors knows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..contracts.checkpoint import Checkpoint
from ..dtypes import ELEMENT_BYTES
from ..errors import ConfigError
from ..text import has_tokenizer, load_tokenizer


def refuse_used(folder: Path) -> None:
    """ConfigError: there is something in it, or it can't be made."""
    try:
        used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise ConfigError(f"{folder} can't be used: {error.strerror or error}; name another folder") from error
    if used:
        raise ConfigError(f"{folder} is not empty: name a folder that is new, or empty it")
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} can't be made: {above} is no folder that may be written to; name another one")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error.strerror or error}; name another folder") from error


def dense_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """As it is stored; blocks become float16, as their own scales are."""
    blocks = checkpoint.tensors()[name].storage not in ELEMENT_BYTES
    return checkpoint.read(name, dtype="float16" if blocks else None)


def write_folder(
    folder: Path, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], scheme: Mapping[str, Any]
) -> None:
    """model.safetensors with `tensors`; config, generation config and tokenizer of `checkpoint`."""
    make_folder(folder)
    write_tensors(folder / "model.safetensors", tensors)
    _write(folder / "config.json", {**checkpoint.config, "quantization_config": scheme})
    if checkpoint.generation:
        _write(folder / "generation_config.json", checkpoint.generation)
    files = checkpoint.tokenizer
    if not has_tokenizer(files):
        return
    tokenizer = load_tokenizer(files)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    config = {**files.config, **{name: token for name, token in named.items() if token is not None}}
    if tokenizer.chat_templates:
        templates = [{"name": name, "template": text} for name, text in tokenizer.chat_templates.items()]
        config["chat_template"] = tokenizer.chat_template if len(templates) == 1 else templates
    _write(folder / "tokenizer_config.json", config)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that whoever may read the files beside it can read: the library makes it the owner's alone."""
    from safetensors.torch import save_file

    path.touch()  # as readable as the system makes new files
    mode = path.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    path.chmod(mode)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
