"""Models and configs that can't work: `Engine(...)` says why and what would be right, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard import CheckpointError, ConfigError, Engine, Part, PegboardError, PluginError, SamplingParams, hookimpl
from pegboard.testing.tiny import tiny_model
from pegboard_sampling.torch_sampler import TorchSampler

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
#: A page of the tiny model in float32: 16 entries, K and V, 2 heads of 16, 3 layers.
PAGE = 16 * 2 * 2 * 16 * 4 * 3


@pytest.fixture
def folder(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """No thread, and no mapping of a file of the model."""
    before, maps = set(threading.enumerate()), Path("/proc/self/maps")

    def left() -> list[str]:
        files = [line for line in maps.read_text().splitlines() if str(tmp_path) in line] if maps.exists() else []
        return files + [thread.name for thread in threading.enumerate() if thread not in before]

    yield
    if left():
        gc.collect()  # an exception's traceback, which is a cycle
    assert left() == []


def refused(kind: type[PegboardError], *words: str, model: Any, **settings: Any) -> str:
    """The message of the refusal, which holds `words`. The exception is gone when this returns."""
    with pytest.raises(kind) as caught:
        Engine(model, **{"device": "cpu", **settings}).close()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json; None takes a key out."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def test_the_undamaged_copy_works(folder: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(folder, device="cpu", max_length=32, max_rows=1)
    assert len(engine.generate([[1, 2]], GREEDY)[0].raise_for_error().token_ids) == 4
    engine.close()


# -- files


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    refused(CheckpointError, "nowhere", "known names: smollm2-135m-instruct", model=str(tmp_path / "nowhere"))
    refused(CheckpointError, "nowhere", model=tmp_path / "nowhere")


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match="model: required"):
        Engine(device="cpu")


def test_an_empty_folder(tmp_path: Path) -> None:
    refused(CheckpointError, "no known format", "safetensors", "gguf", model=tmp_path)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    refused(CheckpointError, "no known format", "safetensors", model=tmp_path / "notes.txt")


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(CheckpointError, "config.json", "missing", model=folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"architectures": ["LlamaForCausalLM"'])
def test_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(CheckpointError, "config.json", "JSON", model=folder)


def test_config_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(CheckpointError, "no safetensors file", "model.safetensors", model=folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", shard_size="50KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    refused(CheckpointError, lost.name, "lacks 1 of", model=folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    refused(CheckpointError, "model.safetensors", model=folder)


def tiny_gguf(path: Path) -> Path:
    """One layer, written by the format's own library."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(211)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (211, 64),
        "blk.0.attn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_norm": (64,),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
        "output_norm": (64,),
        "output": (211, 64),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_whole_gguf_without_a_tokenizer_takes_ids(tmp_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_gguf(tmp_path / "m.gguf"), device="cpu", max_rows=1)
    assert len(engine.generate([[1, 2]], GREEDY)[0].raise_for_error().token_ids) == 4
    engine.close()


@pytest.mark.parametrize("keep", [0, 4, 30, 200, 0.5, 0.999])
def test_truncated_gguf(tmp_path: Path, keep: float) -> None:
    file = tiny_gguf(tmp_path / "m.gguf")
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    refused(CheckpointError, "m.gguf", model=file)


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    refused(CheckpointError, "tokenizer.json", "can be read", model=folder)


# -- tensors


def test_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(CheckpointError, "model.layers.1.self_attn.k_proj.weight", "missing", model=folder)


def test_wrong_shapes_are_named_together(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(60, 64)
        tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 95)
        tensors["lm_head.weight"] = torch.zeros(210, 64)

    change_tensors(folder, change)
    refused(
        CheckpointError,
        "model.layers.0.self_attn.q_proj.weight",
        "(60, 64)",
        "(64, 64)",
        "model.layers.2.mlp.down_proj.weight",
        "(64, 95)",
        "(64, 96)",
        "lm_head.weight",
        model=folder,
    )


def test_everything_wrong_with_the_tensors_is_said_at_once(folder: Path) -> None:
    """DecoderModel.create: every missing or wrong-shaped tensor at once, whether a linear, a norm or the embedding."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.input_layernorm.weight"]
        del tensors["model.layers.0.self_attn.v_proj.weight"]
        tensors["model.norm.weight"] = torch.zeros(63)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(95, 64)

    change_tensors(folder, change)
    refused(
        CheckpointError,
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        model=folder,
    )


# -- config.json


def test_unknown_architecture(folder: Path) -> None:
    edit(folder, architectures=["WhaleForCausalLM"])
    refused(ConfigError, "WhaleForCausalLM", "supported architectures", "LlamaForCausalLM", model=folder)


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [5], [None]], ids=repr)
def test_no_architecture(folder: Path, value: Any) -> None:
    edit(folder, architectures=value)
    refused(CheckpointError, "architecture", "LlamaForCausalLM", model=folder)


def test_unknown_rope_type(folder: Path) -> None:
    edit(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    refused(ConfigError, "spiral", "supported", "llama3", model=folder)


def test_rope_without_its_numbers(folder: Path) -> None:
    edit(folder, rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4})
    refused(ConfigError, "llama3", "low_freq_factor", "high_freq_factor", model=folder)


def test_unknown_activation(folder: Path) -> None:
    edit(folder, hidden_act="relu6")
    refused(ConfigError, "relu6", "supported", "silu", model=folder)


def test_heads_not_divisible(folder: Path) -> None:
    edit(folder, num_attention_heads=4, num_key_value_heads=3)
    refused(ConfigError, "4 attention heads", "3 key-value heads", model=folder)


def test_everything_wrong_with_the_config_is_said_at_once(folder: Path) -> None:
    edit(folder, num_key_value_heads=3, hidden_act="relu6", rope_parameters={"rope_type": "spiral"})
    refused(ConfigError, "relu6", "spiral", "3 key-value heads", model=folder)


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "64", 0, -4, 6.5])
def test_sizes_that_are_none(folder: Path, key: str, value: Any) -> None:
    edit(folder, **{key: value})
    message = refused(ConfigError, model=folder)
    assert key in message or "below 1" in message


#: What a message may say instead of the key.
_WORDS = {
    "num_key_value_heads": ("num_key_value_heads", "key-value heads", "below 1"),
    "head_dim": ("head_dim", "head size", "below 1"),
    "hidden_act": ("hidden_act", "activation"),
    "rope_parameters": ("rope",),
    "attention_bias": ("attention_bias", "bias"),
}
#: A default, and a number that is written as a text.
_HARMLESS = (None, {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", "512"),
        ("max_position_embeddings", -5),
        ("max_position_embeddings", 5.5),
        ("head_dim", "16"),
        ("head_dim", -16),
        ("num_key_value_heads", "2"),
        ("num_key_value_heads", -2),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", None),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "10000"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}),
        ("rope_parameters", "default"),
        ("hidden_act", 5),
        ("tie_word_embeddings", "false"),
        ("attention_bias", "false"),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
        ("quantization_config", "awq"),
    ],
    ids=str,
)
def test_values_of_a_wrong_kind(folder: Path, key: str, value: Any) -> None:
    """Refused by name, or served: never a bare TypeError, never an engine that fails every request."""
    edit(folder, **{key: value})
    if key == "eos_token_id":
        (folder / "generation_config.json").unlink(missing_ok=True)
    try:
        engine = Engine(folder, device="cpu", max_rows=1)
    except PegboardError as error:
        message = str(error)
    else:
        with engine:
            engine.submit([1, 2], SamplingParams(temperature=0.0, max_tokens=4)).result(timeout=30).raise_for_error()
            assert value in _HARMLESS, "served, with a value that means nothing"
        return
    assert any(word in message for word in _WORDS.get(key, (key,)))
    assert "raised" not in message, "a part that stumbles has not said what would be right"


@pytest.mark.parametrize("eos", [211, 50256, [2, 50256], -1])
def test_eos_that_the_vocabulary_lacks(folder: Path, eos: Any) -> None:
    """Seen in the wild after a vocabulary was cut: it can't be chosen, so it ends nothing; refusing is fine, too."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit(folder, eos_token_id=eos)
    try:
        engine = Engine(folder, device="cpu", max_rows=1)
    except PegboardError as error:
        message = str(error)
    else:
        with engine:
            output = engine.submit([1, 2], SamplingParams(temperature=0.0, max_tokens=4)).result(timeout=30)
            output.raise_for_error()
        return
    assert "eos" in message.lower()


@pytest.mark.parametrize(
    "scheme", [{"quant_method": "gzip"}, {"bits": 4}, {"quant_method": "hqq", "bits": 4, "group_size": 128}], ids=str
)
def test_quantization_of_an_unknown_scheme(folder: Path, scheme: dict[str, Any]) -> None:
    edit(folder, quantization_config=scheme)
    refused(ConfigError, "quantizer", str(scheme.get("quant_method", "unknown")), model=folder)


# -- the engine's config


def test_kv_memory_beyond_the_machine(tiny_path: Path) -> None:
    refused(ConfigError, "kv_memory", "available", model=tiny_path, kv_memory="900TiB")


@pytest.mark.parametrize("kv_memory", [1, PAGE - 1, PAGE, 2 * PAGE])
def test_kv_memory_too_small(tiny_path: Path, kv_memory: int) -> None:
    """For a page, and for one request of max_length; the message says how much that is."""
    message = refused(ConfigError, str(kv_memory), "64", model=tiny_path, kv_memory=kv_memory, max_length=64)
    assert "max_length" in message
    assert str(5 * PAGE) in message


@pytest.mark.parametrize("kv_memory", [0, -1, "", "lots", "10 apples", "0%", "101%", 1.5, True, None], ids=repr)
def test_kv_memory_that_is_no_amount(tiny_path: Path, kv_memory: Any) -> None:
    refused(ConfigError, "kv_memory", "2GiB", model=tiny_path, kv_memory=kv_memory)


def test_max_length_beyond_the_context(tiny_path: Path) -> None:
    refused(ConfigError, "max_length", "513", "512", model=tiny_path, max_length=513)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 0),
        ("max_rows", 0),
        ("max_rows", "4"),
        ("max_queue", 0),
        ("max_step_tokens", 0),
        ("page_size", 8),
        ("page_size", 24),
        ("run_ahead", 5),
        ("run_ahead", -1),
        ("run_ahead", True),
        ("stream_buffer", 0),
        ("dtype", "float8"),
        ("kv_dtype", "int3"),
        ("objective", "speed"),
        ("device", "tpu"),
        ("threads", 0),
    ],
    ids=str,
)
def test_settings_out_of_range(tiny_path: Path, key: str, value: Any) -> None:
    refused(ConfigError, key, repr(value), model=tiny_path, **{key: value})


def test_unknown_key(tiny_path: Path) -> None:
    refused(ConfigError, "max_row", "unknown key", "did you mean 'max_rows'?", model=tiny_path, max_row=4)
    refused(ConfigError, "zebra", "unknown key", "max_rows", model=tiny_path, zebra=4)


def test_unknown_option_of_a_part(tiny_path: Path) -> None:
    refused(
        ConfigError,
        "cache.options.prefix_reus",
        "did you mean 'prefix_reuse'?",
        model=tiny_path,
        cache={"use": "paged", "options": {"prefix_reus": False}},
    )


def test_options_for_a_part_without_any(tiny_path: Path) -> None:
    refused(ConfigError, "sampler", "options", model=tiny_path, sampler={"use": "torch", "options": {"temperature": 0}})


def test_unknown_part(tiny_path: Path) -> None:
    refused(ConfigError, "scheduler", "continous", "did you mean 'continuous'?", model=tiny_path, scheduler="continous")


def test_part_that_refuses(tiny_path: Path) -> None:
    refused(ConfigError, "attention", "int8", "float32", model=tiny_path, kv_dtype="int8")
    refused(ConfigError, "attention", "int8", model=tiny_path, kv_dtype="int8", attention="torch")


def test_speculation_that_is_not_there(tiny_path: Path) -> None:
    refused(ConfigError, "ngram", model=tiny_path, speculator="ngrams")
    refused(ConfigError, "max_step_tokens", model=tiny_path, speculator="ngram", max_step_tokens=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_cuda_here(tiny_path: Path) -> None:
    refused(ConfigError, "cuda", "'cpu' or 'auto'", model=tiny_path, device="cuda")
    refused(ConfigError, "cuda:3", "'cpu' or 'auto'", model=tiny_path, device="cuda:3")


def test_several_parts_are_refused_at_once(tiny_path: Path) -> None:
    message = refused(
        ConfigError,
        "quantizr",
        "sampler",
        "int8",
        "static.options",
        "nobody",
        model=tiny_path,
        quantizer="quantizr",
        sampler="greedy",
        kv_dtype="int8",
        cache={"use": "static.options"},
        observers=["nobody"],
    )
    assert message.count("\n  - ") >= 5


def test_several_fields_are_refused_at_once(tiny_path: Path) -> None:
    refused(ConfigError, "max_rows", "page_size", "devise", model=tiny_path, max_rows=0, page_size=5, devise="cpu")


def test_a_length_and_a_part_are_refused_at_once(tiny_path: Path) -> None:
    """Every refusal at once: the length is known to be too much before any part is asked."""
    refused(ConfigError, "max_length", "continous", model=tiny_path, max_length=513, scheduler="continous")


def test_reasons_are_a_list_too(tiny_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(tiny_path, device="cpu", scheduler="continous", sampler="greedy")
    assert len(caught.value.reasons) == 2


# -- plugins


class Broken:
    @hookimpl
    def pegboard_parts(self) -> Sequence[Part]:
        raise RuntimeError("licence server is down")


class Misspelt:
    @hookimpl
    def pegboard_part(self) -> Sequence[Part]:
        return []


def test_plugin_object_that_is_broken(tiny_path: Path) -> None:
    refused(PluginError, "licence server is down", "Broken", model=tiny_path, plugins=[Broken()])
    refused(PluginError, "pegboard_part", "Misspelt", model=tiny_path, plugins=[Misspelt()])
    refused(PluginError, model=tiny_path, plugins=[object()])


class Explodes(TorchSampler):
    """A sampler that says it can, and then can't be made."""

    @classmethod
    def create(cls, need: Any, options: Any) -> Any:
        raise PluginError("no token generator in this machine")


class Exploding:
    @hookimpl
    def pegboard_parts(self) -> Sequence[Part]:
        return [Part(role="sampler", name="explodes", factory=Explodes, summary="can't be made")]


def test_part_that_fails_while_it_is_made(folder: Path) -> None:
    """After the weights were read: they must go, too."""
    gc.collect()
    before = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    refused(PluginError, "no token generator", model=folder, plugins=[Exploding()], sampler="explodes")
    gc.collect()
    assert sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()) <= before
