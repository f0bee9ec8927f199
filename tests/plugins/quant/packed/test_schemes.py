"""What a quantization_config says: which modules are stored how, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.quantizer import QuantizerNeed
from pegboard_quant.packed.awq import awq_scheme
from pegboard_quant.packed.compressed_tensors import compressed_tensors_scheme
from pegboard_quant.packed.gptq import gptq_scheme
from pegboard_quant.packed.quantizers import (
    AwqQuantizer,
    CompressedTensorsQuantizer,
    GptqQuantizer,
    PackedQuantizer,
)

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compressed(weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **outer: Any) -> Any:
    settings = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    one = {"targets": ["Linear"], "weights": settings | (weights or {})} | (group or {})
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": one}}
    return config | outer


def refusals(kind: type[PackedQuantizer], scheme: Any, **changes: Any) -> str:
    need = QuantizerNeed(device=DeviceFacts(type="cpu"), **({"dtype": "float32", "scheme": scheme} | changes))
    return " | ".join(kind.refusals(need, None))


@pytest.mark.parametrize(
    ("kind", "scheme", "said"),
    [
        (AwqQuantizer, AWQ | {"bits": 3}, "bits is 3, known is 4"),
        (AwqQuantizer, AWQ | {"version": "gemv"}, "version is 'gemv', known is 'gemm', 'GEMM': export it as 'gemm'"),
        (AwqQuantizer, AWQ | {"zero_point": False}, "zero_point is False"),
        (AwqQuantizer, AWQ | {"group_size": 0}, "group_size is 0, must be a number of columns, or -1"),
        (AwqQuantizer, AWQ | {"modules_to_not_convert": "lm_head"}, "must be a list of module names"),
        (AwqQuantizer, GPTQ, "reads checkpoints of quant_method 'awq'; this one is quantized with 'gptq'"),
        (AwqQuantizer, {}, "this one is dense"),
        (GptqQuantizer, GPTQ | {"bits": 3}, "bits is 3, known is 4, 8"),
        (GptqQuantizer, GPTQ | {"checkpoint_format": "marlin"}, "export it in the plain GPTQ layout"),
        (GptqQuantizer, GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (GptqQuantizer, GPTQ | {"desc_act": "yes"}, "desc_act is 'yes'"),
        (GptqQuantizer, GPTQ | {"dynamic": {"+:a": {"bits": 2}}}, "dynamic: '+:a': gptq: bits is 2"),
        (GptqQuantizer, GPTQ | {"dynamic": {"(": {}}}, "is no regular expression"),
        (GptqQuantizer, GPTQ | {"dynamic": {"a": {"adapter": {}}}}, "'a' sets adapter; known are bits"),
        (CompressedTensorsQuantizer, compressed(format="float-quantized"), "format is 'float-quantized'"),
        (CompressedTensorsQuantizer, compressed(group={"format": "int-quantized"}), "format is 'int-quantized'"),
        (CompressedTensorsQuantizer, compressed({"num_bits": 2}), "num_bits is 2, known is 4, 8"),
        (CompressedTensorsQuantizer, compressed({"type": "float"}), "type is 'float'"),
        (CompressedTensorsQuantizer, compressed({"strategy": "tensor"}), "strategy is 'tensor'"),
        (CompressedTensorsQuantizer, compressed({"strategy": None, "group_size": None}), "strategy is 'tensor'"),
        (CompressedTensorsQuantizer, compressed({"dynamic": True}), "dynamic is True"),
        (CompressedTensorsQuantizer, compressed(group={"input_activations": {"num_bits": 8}}), "export it as W4A16"),
        (CompressedTensorsQuantizer, compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (CompressedTensorsQuantizer, compressed(sparsity_config={"format": "sparse-24-bitmask"}), "export them dense"),
        (CompressedTensorsQuantizer, compressed(transform_config={"a": 1}), "transform_config"),
        (CompressedTensorsQuantizer, compressed(config_groups={}), "config_groups is {}"),
        (CompressedTensorsQuantizer, compressed(ignore=["re:("]), "holds no regular expression"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(kind: type[PackedQuantizer], scheme: Any, said: str) -> None:
    assert said in refusals(kind, scheme)


def test_every_problem_is_told_at_once() -> None:
    told = refusals(AwqQuantizer, AWQ | {"bits": 3, "version": "gemv"}, dtype="int8", batch_invariant=True)
    for said in ("bits is 3", "version is 'gemv'", "not of int8", "row's neighbours"):
        assert said in told


def test_skipped_modules_are_named_by_whole_components() -> None:
    scheme = awq_scheme(AWQ | {"modules_to_not_convert": ["mlp.gate", "visual", "model.layers.1."]})
    assert scheme.layout("model.layers.0.mlp.gate") is None
    assert scheme.layout("model.layers.0.mlp.gate_proj") is not None
    assert scheme.layout("visual.blocks.0.qkv") is None
    assert scheme.layout("model.layers.1.mlp.up_proj") is None
    assert scheme.layout("model.layers.10.mlp.up_proj") is not None


def test_gptq_dynamic() -> None:
    rules = {"-:.*lm_head": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}, r".*\.7\..*": {"desc_act": True}}
    scheme = gptq_scheme(GPTQ | {"dynamic": rules})
    assert scheme.layout("lm_head") is None
    down, seventh, other = (scheme.layout(f"model.layers.{m}") for m in ("7.down_proj", "7.up_proj", "6.up_proj"))
    assert down is not None
    assert (down.bits, down.group, down.ordered) == (8, 64, False)
    assert seventh is not None
    assert (seventh.bits, seventh.group, seventh.ordered) == (4, 128, True)
    assert other is not None
    assert (other.bits, other.group, other.ordered) == (4, 128, False)


def test_compressed_tensors_targets() -> None:
    tables = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "group_2": {"targets": ["a.down_proj"], "weights": {"num_bits": 4, "strategy": "channel"}},
    }
    scheme = compressed_tensors_scheme(compressed(config_groups=tables, ignore=["lm_head", "re:.*router"]))
    assert scheme.layout("lm_head") is None
    assert scheme.layout("b.router") is None
    found = [scheme.layout(name) for name in ("b.up_proj", "b.down_proj", "a.down_proj")]
    assert [(layout.bits, layout.group) for layout in found if layout is not None] == [(4, 32), (8, -1), (4, -1)]


def test_null_says_as_little_as_nothing() -> None:
    nulls = {"checkpoint_format": None, "modules_to_not_convert": None, "dynamic": None, "desc_act": None}
    assert gptq_scheme(GPTQ | nulls) == gptq_scheme(GPTQ)
    for group, expected in ((64, 64), (-1, -1)):
        scheme = compressed_tensors_scheme(compressed({"strategy": None, "group_size": group, "actorder": None}))
        layout = scheme.layout("a")
        assert layout is not None
        assert (layout.group, layout.ordered) == (expected, False)
