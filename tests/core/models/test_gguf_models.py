"""GGUF files of each architecture, written with the format package's writer and its own names for tensors, against the
transformers checkpoint that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from pegboard import CheckpointError, Engine, SamplingParams
from pegboard.checkpoints.gguf import GGUFCheckpoint
from pegboard.testing.tiny import tiny_model

TYPE = gguf.GGMLQuantizationType
LAYERS = 3
LONG = torch.randint(3, 211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
#: Model type of transformers -> architecture of GGUF, fields of the config.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_theta": 1e6}),
    "gemma3_text": (
        "gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * LAYERS,
            "rope_parameters": GEMMA_ROPE,
            "tie_word_embeddings": True,
        },
    ),
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as the converter orders them for Llama: rotated halves become neighbouring pairs."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(
    path: Path,
    folder: Path,
    arch: str,
    kind: TYPE = TYPE.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> None:
    """What the format's converter writes of a folder; with a block type, `folder` becomes what the blocks say."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stored = tensor.float().numpy()
        if arch == "gemma3" and name.endswith("norm.weight"):
            stored = stored + 1
        blocked = kind != TYPE.F32 and stored.ndim == 2
        if blocked:
            tensors[name] = torch.from_numpy(dequantize(quantize(stored, kind), kind))
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            stored = permuted(stored, heads if ".q_proj." in name else kv_heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, quantize(stored, kind) if blocked else stored, raw_dtype=kind if blocked else None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.supports("Files", "GGUF of Llama, Qwen2, Qwen3 and Gemma 3 (text)")
@pytest.mark.parametrize("kind", [TYPE.F32, TYPE.Q8_0, TYPE.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("model_type", list(SHAPES))
def test_logits(tmp_path: Path, check: Callable[..., None], model_type: str, kind: TYPE) -> None:
    arch, fields = SHAPES[model_type]
    folder = tiny_model(tmp_path / "hf", architecture=model_type, **fields)
    write_gguf(tmp_path / "m.gguf", folder, arch, kind)
    check(tmp_path / "m.gguf", twin=folder)


@pytest.mark.parametrize("model_type", list(SHAPES))
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_heads_and_biases(
    tmp_path: Path, check: Callable[..., None], model_type: str, tied: bool
) -> None:
    arch, fields = SHAPES[model_type]
    fields = fields | {"tie_word_embeddings": tied}
    if model_type == "qwen3":
        fields["attention_bias"] = True
    folder = tiny_model(tmp_path / "hf", architecture=model_type, **fields)
    write_gguf(tmp_path / "m.gguf", folder, arch)
    check(tmp_path / "m.gguf", twin=folder, new=8)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, check: Callable[..., None], model_type: str, kind: str) -> None:
    arch, fields = SHAPES[model_type]
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": 16, "beta_fast": 24.0, "beta_slow": 2.0}
    fields = {**fields, "rope_parameters": rope, "max_position_embeddings": 64}
    fields.pop("rope_theta", None)
    folder = tiny_model(tmp_path / "hf", architecture=model_type, **fields)

    def scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(16)
            writer.add_rope_scaling_yarn_beta_fast(24.0)
            writer.add_rope_scaling_yarn_beta_slow(2.0)

    write_gguf(tmp_path / "m.gguf", folder, arch, change=scaling)
    check(tmp_path / "m.gguf", LONG, twin=folder, new=8)


@pytest.mark.parametrize("pattern", [None, 2, [True, False, True]], ids=str)
def test_gemma3_windows_scaling_and_softcap(tmp_path: Path, check: Callable[..., None], pattern: Any) -> None:
    """Scaling is for layers that see all only; without a pattern every sixth layer does."""
    arch, fields = SHAPES["gemma3_text"]
    layers = 7 if pattern is None else LAYERS
    windowed = [(i + 1) % 6 != 0 for i in range(layers)] if pattern is None else [True, False, True]
    folder = tiny_model(
        tmp_path / "hf",
        architecture="gemma3_text",
        **{
            **fields,
            "num_hidden_layers": layers,
            "layer_types": ["sliding_attention" if value else "full_attention" for value in windowed],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4 if pattern is None else 300.0},
            },
            "query_pre_attn_scalar": 32 if pattern is None else 20,
            "final_logit_softcapping": 5.0,
        },
    )

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_final_logit_softcapping(5.0)
        if pattern is not None:
            writer.add_sliding_window_pattern(pattern)
            writer.add_rope_freq_base_swa(300.0)
            writer.add_attention_scale(20**-0.5)

    write_gguf(tmp_path / "m.gguf", folder, arch, change=change)
    check(tmp_path / "m.gguf", LONG, twin=folder, new=8)


def test_a_missing_head_norm_is_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "hf", architecture="qwen2")
    write_gguf(tmp_path / "m.gguf", folder, "qwen2", change=lambda writer: None)
    content = (tmp_path / "m.gguf").read_bytes().replace(b"qwen2", b"qwen3")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        Engine(tmp_path / "m.gguf", device="cpu")


def test_text_through_a_gguf_file_with_a_sentencepiece_tokenizer(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    """Prompt, byte fallback in the answer, end of turn and chat template, all from the one file."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "ab", "\u2581ab", "  "]
    types = [3, 3, 3, 2, 3, *[6] * 256, *[1] * 5, 4]

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * 264 + [-1.0, -2.0, 0.0])
        writer.add_token_types(types)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
        writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}")

    arch, fields = SHAPES["gemma3_text"]
    folder = tiny_model(tmp_path / "hf", architecture="gemma3_text", **fields | {"vocab_size": 280})
    write_gguf(tmp_path / "m.gguf", folder, arch, change=vocabulary)
    engine = make_engine(tmp_path / "m.gguf", device="cpu", max_rows=1)
    ab, space_ab, two = (pieces.index(piece) for piece in ("ab", "\u2581ab", "  "))
    e_acute = [5 + byte for byte in "é".encode()]

    def forced(*ids: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=3, logit_bias=dict.fromkeys(ids, 1000.0))

    output = engine.generate("ab ab  é", forced(4))
    assert output.prompt_token_ids == (2, ab, space_ab, two, *e_acute)
    assert (output.token_ids, output.finish_reason, output.text) == ((4,), "stop", "")
    assert engine.generate("ab", forced(1)).finish_reason == "stop"
    assert engine.generate("ab", forced(ab)).text == "ababab"
    assert engine.generate("ab", forced(5 + 0x41)).text == "AAA"
    chat = engine.chat([{"role": "user", "content": "ab <bos>"}], forced(ab))
    assert chat.prompt_token_ids[:2] == (2, ab)
    assert chat.prompt_token_ids[-1] == 4
    assert chat.prompt_token_ids.count(2) == 1


@pytest.mark.parametrize("model_type", list(SHAPES))
def test_transformers_reads_the_same_tensors_of_the_file(tmp_path: Path, model_type: str) -> None:
    """Its own reader of the format agrees about names, rows and norms, so `write_gguf` follows the conventions."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    arch, fields = SHAPES[model_type]
    folder = tiny_model(tmp_path / "hf", architecture=model_type, **fields)
    write_gguf(tmp_path / "m.gguf", folder, arch, TYPE.Q8_0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    ours = GGUFCheckpoint.open(tmp_path / "m.gguf")
    assert set(ours.tensors()) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours.read(name, dtype="float32"), tensor.float()), name
