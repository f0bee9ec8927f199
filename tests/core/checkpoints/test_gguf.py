"""Files are made by the gguf package's own writer; values are compared with its quantizers or with the original."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.checkpoints.gguf import GGUFCheckpoint
from pegboard.checkpoints.gguf_dialect import make_config, make_generation
from pegboard.checkpoints.gguf_header import BLOCK_TYPES
from pegboard.errors import CheckpointError
from pegboard.hub import resolve_model

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE = 4, 2, 16, 64, 256
TYPE = gguf.GGMLQuantizationType


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to the rows of q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def originals() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    shapes = {
        "token_embd": (40, HIDDEN),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, WIDE),
    }
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)


def write(
    path: Path,
    kind: TYPE = TYPE.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    arch: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    metadata(writer)
    change(writer)
    for name, value in (originals() | (extra or {})).items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = interleave(value, heads) if heads else value
        if stored.ndim == 1 or kind == TYPE.F32:
            writer.add_tensor(name, stored)
        else:
            writer.add_tensor(name, quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def plain(tmp_path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint.open(write(tmp_path / "m.gguf"))


def test_the_table_of_types_is_the_formats_own() -> None:
    for number, (name, block, block_bytes) in BLOCK_TYPES.items():
        assert TYPE[name] == number
        assert gguf.GGML_QUANT_SIZES[TYPE(number)] == (block, block_bytes)


def test_names_shapes_and_original_rows(plain: GGUFCheckpoint) -> None:
    original = originals()
    names = {
        "token_embd": "model.embed_tokens",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    }
    assert set(plain.tensors()) == {f"{name}.weight" for name in names.values()}
    for stored, name in names.items():
        wanted = torch.from_numpy(original[f"{stored}.weight"])
        info = plain.tensors()[f"{name}.weight"]
        assert (info.shape, info.storage, info.nbytes) == (tuple(wanted.shape), "float32", wanted.numel() * 4)
        assert torch.equal(plain.read(f"{name}.weight"), wanted)


@pytest.mark.parametrize("kind", [TYPE.F16, TYPE.BF16, TYPE.Q4_0, TYPE.Q4_1, TYPE.Q5_0, TYPE.Q5_1, TYPE.Q8_0], ids=str)
@pytest.mark.parametrize("name", ["attn_q", "attn_k", "ffn_down"])
def test_every_part_of_a_tensor_equals_the_part_of_the_whole(tmp_path: Path, kind: TYPE, name: str) -> None:
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "m.gguf", kind))
    original = originals()[f"blk.0.{name}.weight"]
    # Rows are quantized one by one, so the order of rows does not matter here.
    wanted = torch.from_numpy(dequantize(quantize(original, kind), kind))
    module = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}[name]
    full = f"model.layers.0.{module}.weight"
    assert torch.equal(checkpoint.read(full, dtype="float32"), wanted)
    for dim in (0, 1):
        size = wanted.shape[dim]
        for start, length in ((0, size), (0, 0), (5, 7), (size // 2, size // 2), (size - 1, 1), (31, 2)):
            if start + length <= size:
                part = checkpoint.read(full, dtype="float32", dim=dim, start=start, length=length)
                assert torch.equal(part, wanted.narrow(dim, start, length)), (dim, start, length)
    assert torch.equal(checkpoint.read(full, dtype="bfloat16"), wanted.bfloat16())


def test_blocks_come_as_stored_in_the_order_of_read(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "m.gguf", TYPE.Q8_0))
    for stored, name in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        original = originals()[f"blk.0.{stored}.weight"]
        blocks = checkpoint.read_blocks(f"model.layers.0.{name}.weight")
        assert blocks.dtype == torch.uint8
        assert torch.equal(blocks, torch.from_numpy(quantize(original, TYPE.Q8_0)))
    assert checkpoint.tensors()["model.layers.0.mlp.down_proj.weight"].storage == "Q8_0"
    with pytest.raises(CheckpointError, match="not in blocks"):
        checkpoint.read_blocks("model.layers.0.input_layernorm.weight")


def test_q8_0_by_its_definition(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "m.gguf", TYPE.Q8_0))
    name = "model.layers.0.mlp.down_proj.weight"
    blocks = checkpoint.read_blocks(name).reshape(HIDDEN, -1, 34)
    scale = blocks[..., :2].contiguous().view(torch.float16).double()
    wanted = (scale * blocks[..., 2:].contiguous().view(torch.int8).double()).reshape(HIDDEN, WIDE)
    assert torch.equal(checkpoint.read(name).double(), wanted)


@pytest.mark.parametrize("kind", [TYPE.Q2_K, TYPE.Q3_K, TYPE.Q4_K, TYPE.Q5_K, TYPE.Q6_K, TYPE.IQ4_XS], ids=str)
def test_superblocks_and_chunks(tmp_path: Path, kind: TYPE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.checkpoints.gguf._CHUNK", 3 * 512)  # three rows at a time
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 60, (8, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    metadata(writer)
    writer.add_vocab_size(40)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint.open(tmp_path / "m.gguf")
    wanted = torch.from_numpy(dequantize(raw, kind))
    assert checkpoint.tensors()["model.layers.0.mlp.up_proj.weight"].shape == (8, 512)
    assert torch.equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), wanted)
    part = checkpoint.read("model.layers.0.mlp.up_proj.weight", dim=1, start=250, length=10)
    assert torch.equal(part, wanted[:, 250:260])


def test_config(plain: GGUFCheckpoint) -> None:
    assert plain.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 128,
        "vocab_size": 40,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert plain.generation == {}


KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 100,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.vocab_size": 7,
}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, {"num_key_value_heads": 4, "rope_theta": 10000.0, "vocab_size": 7, "head_dim": 16}),
        ({"llama.attention.head_count_kv": [2, 2]}, {"num_key_value_heads": 2}),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, {"head_dim": 32}),
        ({"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0}, {"bos_token_id": 1, "eos_token_id": 0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 50,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 50,
                    "beta_fast": 16.0,
                }
            },
        ),
    ],
)
def test_config_from_keys(change: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = make_config(KEYS | change, {})
    assert {key: config.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; supported: llama"),
        ({"general.architecture": ["llama"]}, "not supported"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
        ({"llama.attention.head_count_kv": [1, 2]}, "for all layers"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "positive number"),
        ({"general.architecture": "qwen3moe"}, "'qwen3moe' is not supported; supported: llama, qwen2, qwen3, gemma3"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window is 64; expected none"),
        ({"llama.attention.scale": 0.5}, r"attention\.scale is 0\.5"),
        ({"llama.logit_scale": 0.5}, r"logit_scale is 0\.5"),
        ({"llama.attention.key_length_swa": 8}, "head sizes"),
        ({"llama.attention.causal": False}, "sees the text after"),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 16}, "different head sizes"),
        ({"llama.rope.dimension_count": 8}, "only part of each head"),
        ({"llama.attention.key_length": 15, "llama.attention.value_length": 15}, "odd"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not supported"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_attn_factor": 0.5,
            },
            "yarn_attn_factor other than 1",
        ),
        ({"tokenizer.ggml.eos_token_id": [3]}, "expected a token id"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_config(KEYS | change, {})


GEMMA = {key.replace("llama", "gemma3"): value for key, value in KEYS.items()} | {"general.architecture": "gemma3"}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0}),
        (
            {"gemma3.block_count": 62, "gemma3.attention.key_length": 32, "gemma3.attention.value_length": 32},
            {"query_pre_attn_scalar": 16, "head_dim": 32},
        ),
        ({"gemma3.attention.sliding_window": 8}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}),
        (
            {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": 1},
            {"layer_types": ["full_attention"] * 2},
        ),
        (
            {"gemma3.attn_logit_softcapping": 50.0, "gemma3.final_logit_softcapping": 30.0},
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
    ],
)
def test_config_of_gemma3(change: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = make_config(GEMMA | change, {})
    assert {key: config.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("pattern", [0, "six", [True], [1, 0]], ids=str)
def test_patterns_of_windows_that_are_refused(pattern: Any) -> None:
    keys = GEMMA | {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": pattern}
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern is .* period of layers"):
        make_config(keys, {})


def test_rope_factors_are_for_llama_only() -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight .* gemma3"):
        make_config(GEMMA, {"rope_freqs.weight": (8,)})


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, None),
        ({"eos_token_id": 1}, [1, 2]),
        ({"eos_token_id": 2}, 2),
        ({"eos_token_id": 1, "eot_token_id": 0}, [1, 0]),
        ({"eos_token_id": 1, "eom_token_id": 3}, [1, 2, 3]),
        ({"eos_token_id": 1, "token_type": [3, 3, 1, 3]}, 1),
    ],
)
def test_what_ends_a_turn(keys: dict[str, Any], ends: Any) -> None:
    """Chat models whose file names only the end of the text have their end of turn among the control tokens."""
    tokens = {"tokens": ["<s>", "</s>", "<|eot_id|>", "<tool>"], "token_type": [3, 3, 3, 3]}
    generation = make_generation({f"tokenizer.ggml.{key}": value for key, value in {**tokens, **keys}.items()})
    assert generation.get("eos_token_id") == (2 if ends is None else ends)


def test_rope_factors_head_and_biases_show_in_the_config(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    extra = {
        "rope_freqs.weight": factors,
        "output.weight": np.ones((40, HIDDEN), dtype=np.float32),
        "blk.0.attn_q.bias": bias,
    }

    def ends(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(9)

    checkpoint = GGUFCheckpoint.open(write(tmp_path / "m.gguf", extra=extra, change=ends))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "gguf_factors"}
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.generation == {"bos_token_id": 1, "eos_token_id": [2, 9]}
    assert torch.equal(checkpoint.read("rope_freqs.weight"), torch.from_numpy(factors))
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), torch.from_numpy(bias))


def test_metadata_of_every_type_and_alignment(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(128)
        writer.add_token_list(["a", "Ġb", "é"])
        writer.add_token_types([1, 3, 4])
        writer.add_array("x.floats", [0.5, 1.5])
        writer.add_array("x.bools", [True, False])
        writer.add_bool("x.yes", True)
        writer.add_int8("x.i8", -3)
        writer.add_int64("x.i64", -(1 << 40))
        writer.add_uint64("x.u64", 1 << 40)
        writer.add_float64("x.f64", 0.1)

    path = write(tmp_path / "m.gguf", change=change)
    checkpoint = GGUFCheckpoint.open(path)
    assert checkpoint.tokenizer.gguf == {
        "tokenizer.ggml.tokens": ["a", "Ġb", "é"],
        "tokenizer.ggml.token_type": [1, 3, 4],
    }
    values = {key: checkpoint.metadata[key] for key in checkpoint.metadata if key.startswith("x.")}
    assert values == {
        "x.floats": [0.5, 1.5],
        "x.bools": [True, False],
        "x.yes": True,
        "x.i8": -3,
        "x.i64": -(1 << 40),
        "x.u64": 1 << 40,
        "x.f64": 0.1,
    }
    wanted = torch.from_numpy(originals()["token_embd.weight"])
    assert torch.equal(checkpoint.read("model.embed_tokens.weight"), wanted)


def split(folder: Path, change_second: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> list[Path]:
    paths = [folder / f"m-{part:05d}-of-00002.gguf" for part in (1, 2)]
    tensors = list(originals().items())
    for number, (path, part) in enumerate(zip(paths, (tensors[:1], tensors[4:]), strict=True)):
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            metadata(writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        if number == 1:
            change_second(writer)
        for name, value in part:
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_files(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    for path in (first, second, tmp_path):
        assert GGUFCheckpoint.recognises(path)
        checkpoint = GGUFCheckpoint.open(path)
        for stored, name in (("token_embd", "embed_tokens"), ("blk.0.ffn_down", "layers.0.mlp.down_proj")):
            wanted = torch.from_numpy(originals()[f"{stored}.weight"])
            assert torch.equal(checkpoint.read(f"model.{name}.weight"), wanted)
    alone = second.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="must keep their names"):
        GGUFCheckpoint.open(alone)
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 parts: m-00002-of-00002\.gguf"):
        GGUFCheckpoint.open(first)
    with pytest.raises(CheckpointError, match="of one model"):
        GGUFCheckpoint.open(tmp_path)


def test_what_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path / "model.bin")
    assert GGUFCheckpoint.recognises(path)
    assert not GGUFCheckpoint.recognises(tmp_path)
    assert not GGUFCheckpoint.recognises(tmp_path / "nowhere")
    assert not GGUFCheckpoint.recognises(Path(__file__))


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="does not exist"):
        GGUFCheckpoint.open(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        GGUFCheckpoint.open(path)
    path.write_bytes(b"GGML" + bytes(60))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUFCheckpoint.open(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(60))
    with pytest.raises(CheckpointError, match="version 1; supported: 2, 3"):
        GGUFCheckpoint.open(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(60))
    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFCheckpoint.open(path)
    with pytest.raises(CheckpointError, match="'qwen9' is not supported; supported: llama"):
        GGUFCheckpoint.open(write(tmp_path / "other.gguf", arch="qwen9"))


HEADER = b"GGUF" + struct.pack("<I", 3)
HUGE = 1 << 62


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<QQ", 0, HUGE), "inside its counts"),
        (struct.pack("<QQ", HUGE, 0), "inside its counts"),
        (struct.pack("<QQQ", 0, 1, HUGE), "inside a key"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IQ", 8, HUGE), "inside k"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE), "inside k"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE), "inside k"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), "inside k"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "array of the unknown value type 9"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 99), "unknown value type 99"),
        (struct.pack("<QQ", 0, 2) + 2 * (text("k") + struct.pack("<II", 4, 1)), "'k' appears twice"),
        (struct.pack("<QQQ", 0, 1, 2) + b"\xff\xfe" + bytes(50), "a key is not valid UTF-8"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<I", 5), "has 5 dimensions"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0), "impossible shape"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 64, 77, 0), "type 77, which is not read"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 33, 8, 0), "no multiple of Q8_0's 32"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 1, 0, 3), "not aligned"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 1, 0, HUGE), "truncated"),
        (struct.pack("<QQ", 2, 0) + 2 * (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)), "'t' appears twice"),
        (
            struct.pack("<QQ", 2, 0) + b"".join(text(n) + struct.pack("<IQIQ", 1, 1, 0, 0) for n in "tu") + bytes(64),
            "'u' overlaps tensor 't'",
        ),
        (
            struct.pack("<QQ", 0, 1) + text("general.alignment") + struct.pack("<II", 4, 3),
            "general.alignment is 3, not a power of two",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HEADER + content + bytes(32))
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint.open(path)


def with_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_token_list(["a", "b", "long token"])
    writer.add_array("x.numbers", [1, 2, 3])


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TYPE.Q8_0, with_vocabulary)
    whole = path.read_bytes()
    reader = gguf.GGUFReader(path)
    begin = min(tensor.data_offset for tensor in reader.tensors)
    end = max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
    cut = tmp_path / "cut.gguf"
    for size in [*range(begin + 1), *range(begin + 1, end, 97), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            GGUFCheckpoint.open(cut)
    cut.write_bytes(whole[:end])
    GGUFCheckpoint.open(cut)


@settings(max_examples=150 * (1 + 20 * int(os.environ.get("PEGBOARD_FULL", "0"))), deadline=None)
@given(changes=st.lists(st.tuples(st.integers(4, 1400), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_are_refused_or_read_but_never_crash(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    path = write(folder / "m.gguf", TYPE.Q8_0, with_vocabulary)
    content = bytearray(path.read_bytes())
    for at, value in changes:
        content[at] = value
    path.write_bytes(content)
    try:
        checkpoint = GGUFCheckpoint.open(path)
        _ = checkpoint.generation, checkpoint.tokenizer
    except CheckpointError:
        return
    for name, info in checkpoint.tensors().items():
        assert checkpoint.read(name).shape == info.shape


def smollm2() -> Path:
    try:
        return resolve_model("smollm2-135m-instruct")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.mark.model
def test_smollm2_agrees_with_the_format_packages_reader() -> None:
    checkpoint, reader = GGUFCheckpoint.open(smollm2()), gguf.GGUFReader(smollm2())
    assert len(checkpoint.tensors()) == len(reader.tensors) == 272
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("blk.13.ffn_down.weight", "model.layers.13.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        wanted = dequantize(stored[theirs].data, stored[theirs].tensor_type)
        assert torch.equal(checkpoint.read(ours), torch.from_numpy(np.array(wanted)))
    q = dequantize(stored["blk.5.attn_q.weight"].data, TYPE.Q4_1)
    ours = checkpoint.read("model.layers.5.self_attn.q_proj.weight").numpy()
    assert np.array_equal(interleave(ours, 9), q)


@pytest.mark.model
def test_smollm2_config_agrees_with_transformers() -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = load_gguf_checkpoint(str(smollm2()))["config"]
    ours = GGUFCheckpoint.open(smollm2()).config
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert ours[key] == theirs[key]
    for key in ("max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id", "model_type", "rope_theta"):
        assert ours[key] == theirs[key]
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    assert ours["tie_word_embeddings"] is True
