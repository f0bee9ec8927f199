"""Models of quantized checkpoints, written from the formats' definitions, against transformers in float32 on the
weights that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.errors import CheckpointError
from pegboard.testing.oracles import packed as written
from pegboard.testing.tiny import tiny_model

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]

AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def compressed(bits: int, group: int, symmetric: bool, **weights: Any) -> dict[str, Any]:
    settings = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    tables = {"group_0": {"targets": ["Linear"], "weights": settings | weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return config | {"config_groups": tables}


def write_awq(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
    return written.awq(codes, zeros, scales)


def quantize(
    folder: Path,
    twin: Path,
    config: Mapping[str, Any],
    write: Writer,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    shuffled: bool = False,
    dense: Callable[[str], bool] = lambda name: False,
) -> None:
    """Every linear of the folder becomes packed, but the head and what is `dense`; `twin` gets what that means."""
    from safetensors.torch import load_file, save_file

    twin.mkdir()
    for file in folder.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    stored, meant = {}, {}
    largest = (1 << bits) - 1
    for number, (name, weight) in enumerate(load_file(folder / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        kept = weight.ndim != 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight")
        if kept or dense(module):
            stored[name] = meant[name] = weight
            continue
        group_of = written.runs(weight.shape[1], group)
        if shuffled:
            group_of = group_of[torch.randperm(len(group_of), generator=torch.Generator().manual_seed(number))]
        members = [weight[:, group_of == index] for index in range(int(group_of.max()) + 1)]
        low = torch.stack([part.amin(1) for part in members], 1).clamp(max=0)
        high = torch.stack([part.amax(1) for part in members], 1).clamp(min=0)
        if symmetric:
            scales, zeros = (torch.maximum(high, -low) / (largest // 2)).half(), torch.full_like(low, largest // 2 + 1)
        else:
            scales = ((high - low) / largest).half()
            zeros = (-low / scales).round().clamp(0, largest)
        codes = ((weight / scales[:, group_of]).round() + zeros[:, group_of]).clamp(0, largest).long()
        stored |= {f"{module}.{suffix}": t for suffix, t in write(codes, zeros.long(), scales, group_of).items()}
        meant[name] = written.meant(codes, zeros.long(), scales, group_of).float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, twin / "model.safetensors", {"format": "pt"})
    told = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(told))


@pytest.mark.supports("Quantization", "AWQ checkpoints (4 bits, GEMM layout)")
@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2"])
def test_awq(tmp_path: Path, check: Callable[..., None], architecture: str) -> None:
    folder = tiny_model(tmp_path / "m", architecture=architecture)
    quantize(folder, tmp_path / "twin", AWQ, write_awq)
    check(folder, twin=tmp_path / "twin", new=8)


def test_awq_of_experts(tmp_path: Path, check: Callable[..., None]) -> None:
    """The router is dense and named as skipped; "mlp.gate" must not skip "mlp.gate_proj"."""
    folder = tiny_model(tmp_path / "m", architecture="qwen3_moe")
    config = AWQ | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}
    quantize(folder, tmp_path / "twin", config, write_awq)
    check(folder, twin=tmp_path / "twin", new=8)


@pytest.mark.supports("Quantization", "GPTQ checkpoints (4 and 8 bits, zero points of both versions, act-order)")
@pytest.mark.parametrize(
    ("bits", "version", "group", "act_order", "symmetric"),
    [
        (4, 1, 32, False, False),
        (4, 2, 32, True, False),
        (8, 1, -1, False, True),
        (8, 2, 64, True, True),
        (4, 1, -1, True, True),
    ],
)
def test_gptq(
    tmp_path: Path, check: Callable[..., None], bits: int, version: int, group: int, act_order: bool, symmetric: bool
) -> None:
    config = GPTQ | {"bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"

    def write(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.gptq(codes, zeros, scales, bits, version, group_of)

    folder = tiny_model(tmp_path / "m", attention_bias=True)
    quantize(folder, tmp_path / "twin", config, write, bits=bits, group=group, symmetric=symmetric, shuffled=act_order)
    check(folder, twin=tmp_path / "twin", new=8)


@pytest.mark.supports("Quantization", "compressed-tensors checkpoints (pack-quantized W4A16 and W8A16)")
@pytest.mark.parametrize(
    ("bits", "symmetric", "actorder"),
    [(4, True, None), (4, False, None), (8, True, None), (8, False, "weight"), (4, True, "group")],
)
def test_compressed_tensors(
    tmp_path: Path, check: Callable[..., None], bits: int, symmetric: bool, actorder: str | None
) -> None:
    def write(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        order = group_of if actorder == "group" else None
        return written.compressed(codes, None if symmetric else zeros, scales, bits, order)

    folder = tiny_model(tmp_path / "m", tie_word_embeddings=True)
    config = compressed(bits, 32, symmetric, actorder=actorder)
    shuffled = actorder == "group"
    quantize(folder, tmp_path / "twin", config, write, bits=bits, symmetric=symmetric, shuffled=shuffled)
    check(folder, twin=tmp_path / "twin", new=8)


@pytest.mark.supports("Quantization", "modules that a scheme skips are dense, within fused linears, too")
def test_skipped_and_mixed(tmp_path: Path, check: Callable[..., None]) -> None:
    """The first layer is dense, of every q, k and v the k; 8 bits somewhere else."""

    def dense(module: str) -> bool:
        return ".layers.0." in module or module.endswith("k_proj")

    def write(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.compressed(codes, None, scales, 8)

    folder = tiny_model(tmp_path / "m")
    config = compressed(8, 32, True) | {"ignore": ["re:.*k_proj", r"re:model\.layers\.0\..*", "lm_head"]}
    quantize(folder, tmp_path / "twin", config, write, bits=8, symmetric=True, dense=dense)
    check(folder, twin=tmp_path / "twin", new=8)


def test_the_weights_stay_packed(tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    """The plan's bytes, before loading, are those that are held."""
    folder = tiny_model(tmp_path / "m")
    plain = make_engine(folder, device="cpu").plan.memory.weights
    quantize(folder, tmp_path / "twin", AWQ, write_awq)
    engine = make_engine(folder, device="cpu")
    planned, held = engine.plan.memory.weights, engine._phases.executor._runner._parts.model.weight_bytes
    assert engine.plan.parts["quantizer"].name == "awq"
    assert planned == held < plain / 2
    assert not engine.unused_tensors


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path / "m")
    quantize(folder, tmp_path / "twin", AWQ, write_awq)
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.0.mlp.down_proj.qzeros"]
    stored["model.layers.1.self_attn.k_proj.scales"] = torch.zeros(3, 32, dtype=torch.float16)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        make_engine(folder, device="cpu")
    assert "missing tensor model.layers.0.mlp.down_proj.qzeros" in str(error.value)
    assert "model.layers.1.self_attn.k_proj.scales has shape (3, 32), expected (2, 32)" in str(error.value)


@pytest.mark.parametrize(("name", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize("tied", [False, True])
def test_rounding_on_load(tmp_path: Path, check: Callable[..., None], name: str, bits: int, tied: bool) -> None:
    """The rounding itself has tests of its own."""
    from safetensors.torch import load_file, save_file

    from pegboard_quant.packed.rounding import round_to_nearest
    from pegboard_quant.packed.weight import dense

    folder = tiny_model(tmp_path / "m", tie_word_embeddings=tied)
    twin = tiny_model(tmp_path / "twin", tie_word_embeddings=tied)
    weights = load_file(twin / "model.safetensors")
    for weight_name, weight in weights.items():
        if weight_name.endswith("_proj.weight"):
            weights[weight_name] = dense(round_to_nearest(weight, bits, 32, symmetric=False))
    save_file(weights, twin / "model.safetensors", {"format": "pt"})
    quantizer = {"use": name, "options": {"group": 32, "symmetric": False}}
    check(folder, twin=twin, new=8, quantizer=quantizer)
