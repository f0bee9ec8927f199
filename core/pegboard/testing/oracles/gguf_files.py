"""GGUF files with the types that published ones have, made from others or from a folder of a Llama."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .gguf_blocks import block_size, meant, quantized

#: What becomes of a matrix: (name in the file, columns) -> block type.
KindOf = Callable[[str, int], str]
#: Types that need whole blocks of 256 -> what stands in for them in other widths.
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def typed(kind: str, layers: int = 0) -> KindOf:
    """All matrices of one type, or with "Q4_K_M" and "Q5_K_M" what the format's own tool mixes: Q6_K for embedding and
    head, and for values and the last matrix of the MLP in the first and last eighth of the layers and every third of
    the others. Where columns are no whole blocks, types of smaller ones."""
    base, mixed = kind.removesuffix("_M"), kind.endswith("_M")

    def kind_of(name: str, columns: int) -> str:
        found = base
        if mixed:
            layer = re.match(r"blk\.(\d+)\.(?:attn_v|ffn_down)\.", name)
            if name in ("token_embd.weight", "output.weight") or (layer and _has_more(int(layer[1]), layers)):
                found = "Q6_K"
        return found if columns % block_size(found)[0] == 0 else _INSTEAD[found]

    return kind_of


def _has_more(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def rewrite(source: Path, target: Path, kind: str) -> Path:
    """`target`: the file `source` with its matrices as `typed` says: those of another type are rounded anew from what
    their blocks mean."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    kind_of = typed(kind, int(reader.fields[f"{architecture}.block_count"].contents()))
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if tensor.tensor_type.name == kind_of(tensor.name, shape[-1]):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        dense = torch.from_numpy(gguf.quants.dequantize(tensor.data.copy(), tensor.tensor_type)).view(shape)
        _add(writer, tensor.name, dense, kind_of)
    _write(writer)
    return target


def write_llama(folder: Path, target: Path, kind: str) -> Path:
    """`target`: a Llama's folder with one safetensors file, with its matrices as `typed` says. The folder's weights
    become what the blocks mean."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers, heads, kv_heads = (
        config[f"num_{what}"] for what in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    tensors, kind_of = load_file(folder / "model.safetensors"), typed(kind, layers)
    for name, tensor in tensors.items():
        rows = tensor.float()
        for part, count in ((".q_proj.", heads), (".k_proj.", kv_heads)):
            if part in name:  # the format has rotated halves as neighbouring pairs
                rows = torch.unflatten(rows, 0, (count, 2, -1)).transpose(1, 2).reshape(rows.shape)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"a Llama in GGUF has no tensor for {name}")
        used = _add(writer, theirs, rows, kind_of)
        tensors[name] = tensor if used is None else meant(quantized(tensor, used), used)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(writer)
    return target


def _add(writer: gguf.GGUFWriter, name: str, values: Tensor, kind_of: KindOf) -> str | None:
    """The type that a matrix got; None: it is none, and is float32."""
    if values.dim() < 2:
        writer.add_tensor(name, values.contiguous().numpy())
        return None
    kind = kind_of(name, values.shape[-1])
    writer.add_tensor(name, quantized(values, kind).numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
    return kind


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
