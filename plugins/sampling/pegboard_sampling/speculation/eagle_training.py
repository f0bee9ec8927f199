"""The layer of EAGLE-1 as it is trained: embedding and output matrix are the target's, and stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard import ConfigError
from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.speculator import HeadText, HeadTrainer, HeadTraining
from pegboard.models.llama import LlamaConfig

from .choosing_loss import candidates
from .eagle_layer import EagleLayer, attend_where, shapes

#: Of the choice beside that of the state, as the paper has it.
_CHOICE = 0.1
#: Fields of the target's config that its layer takes over.
_COMMON = ("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class EagleTrainer(HeadTrainer):
    """Learns the target's next state (smooth L1) and what the target makes of it (cross entropy of distributions)."""

    def __init__(self, training: HeadTraining) -> None:
        self._embedding, self._matrix = training.embedding, training.head
        self._random = torch.Generator().manual_seed(training.seed)
        target = training.target
        layer = target.layers[-1]
        if not isinstance(layer, AttentionLayer):
            raise ConfigError(f"the last layer of {target.architecture} has no attention that EAGLE's could be like")
        self._config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": target.hidden_size,
            "intermediate_size": training.config.get("intermediate_size") or 3 * target.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": layer.query_heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.head_size,
            "vocab_size": target.vocab_size,
            "hidden_act": "silu",
            "bias": False,
        }
        self._config |= {name: training.config[name] for name in _COMMON if training.config.get(name) is not None}
        if "rope_parameters" not in self._config:
            self._config.setdefault("rope_theta", 10000.0)
        config = LlamaConfig.read(self._config)
        self._weights = {
            name: self._first(name, shape).to(training.head.device).requires_grad_()
            for name, shape in shapes(config, target.vocab_size, set()).items()
        }
        self._layer = EagleLayer(config, LlamaConfig.complete(self._config), self._weights, target.context_length)

    def _first(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The state passes through at first; what the rest adds is small."""
        if len(shape) == 1:
            return torch.ones(shape)
        weight = 0.02 * torch.randn(shape, generator=self._random)
        if name == "fc.weight":
            weight[:, shape[0] :] += torch.eye(shape[0])
        return weight

    @property
    def parameters(self) -> Sequence[Tensor]:
        return tuple(self._weights.values())

    def loss(self, texts: Sequence[HeadText]) -> Tensor:
        among = candidates(torch.cat([text.greedy for text in texts]), self._matrix.shape[0], self._random)
        matrix = self._matrix[among]
        states = torch.cat([self._states(text) for text in texts])
        expected = torch.cat([text.hidden[1:] for text in texts])
        with torch.no_grad():
            shares = (expected @ matrix.T).softmax(-1)
        choice = functional.cross_entropy(states @ matrix.T, shares)
        return functional.smooth_l1_loss(states, expected) + _CHOICE * choice

    def _states(self, text: HeadText) -> Tensor:
        """[N - 2, E]: what is expected after each token but the first and the last."""
        hidden = text.hidden[None, :-1]
        count = hidden.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool, device=hidden.device).tril()
        positions = torch.arange(count, device=hidden.device)[None]
        embedded = self._embedding[text.ids[None, 1:-1]]
        layer = self._layer
        return layer.forward(embedded, hidden, lambda qkv: attend_where(*layer.turned(qkv, positions), seen))[0]

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config
