"""Scales that move before a linear change nothing of what the model computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from pegboard.contracts.quantizer import LinearSpec
from pegboard.errors import ConfigError
from pegboard.quantizing.folding import Folding
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint

GATE_UP = LinearSpec(
    name="model.layers.0.mlp.gate_up_proj",
    sources=("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
    in_features=8,
    out_features=(12, 12),
)
DOWN = LinearSpec(
    name="model.layers.0.mlp.down_proj", sources=("model.layers.0.mlp.down_proj",), in_features=12, out_features=(8,)
)
NORM = "model.layers.0.post_attention_layernorm.weight"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_gated_mlp_computes_what_it_did() -> None:
    norm, x = normal(8, seed=1), normal(5, 8, seed=2)
    weights = {GATE_UP.name: normal(24, 8, seed=3), DOWN.name: normal(8, 12, seed=4)}

    def mlp(norm: Tensor) -> Tensor:
        gate, up = ((x * norm) @ weights[GATE_UP.name].T).chunk(2, dim=1)
        return (silu(gate) * up) @ weights[DOWN.name].T

    before, was = mlp(norm), {name: weight.clone() for name, weight in weights.items()}
    folding = Folding([GATE_UP, DOWN], MemoryCheckpoint({NORM: norm}))
    for name in weights:
        folding.fold(name, weights, lambda weight: torch.linspace(0.5, 3, weight.shape[1]))
    torch.testing.assert_close(mlp(folding.norms[NORM]), before)
    assert all(not torch.equal(weights[name], was[name]) for name in weights)


def test_what_has_nowhere_to_go_stays() -> None:
    """An attention's last linear reads values that several heads share; biases of an MLP don't scale."""
    o = LinearSpec(name="model.layers.0.self_attn.o_proj", sources=("o",), in_features=8, out_features=(8,))
    biased = LinearSpec(
        name=GATE_UP.name, sources=GATE_UP.sources, in_features=8, out_features=GATE_UP.out_features, bias=True
    )
    folding = Folding([o, biased, DOWN], MemoryCheckpoint({}))
    weights = {spec.name: normal(sum(spec.out_features), spec.in_features) for spec in (o, biased, DOWN)}
    was = {name: weight.clone() for name, weight in weights.items()}
    for name in weights:
        folding.fold(name, weights, lambda weight: torch.full((weight.shape[1],), 2.0))
    assert all(torch.equal(weights[name], was[name]) for name in weights)
    assert not folding.norms


def test_norms_of_another_kind_are_refused() -> None:
    stored = MemoryCheckpoint({"model.layers.0.pre_feedforward_layernorm.weight": normal(8)})
    with pytest.raises(ConfigError, match="use method 'gptq' or 'rtn'"):
        Folding([], stored)
