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
from .eagle_layer import EagleLayer, shapes

#: Of the choice beside that of the state, as the paper has it.
_CHOICE = 0.1
#: Share of the target's states that the layer gets its own in place of, as it will behind a draft.
_OWN = 0.3
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
        self._attend = training.attention(
            AttentionLayer(
                query_heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                head_size=config.head_size,
                scale=config.head_size**-0.5,
            )
        )
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
        expected = torch.cat([text.hidden[1:] for text in texts])
        states = self._states(texts)
        with torch.no_grad():
            shares = (expected @ matrix.T).softmax(-1)
        choice = functional.cross_entropy(states @ matrix.T, shares)
        return functional.smooth_l1_loss(states, expected) + _CHOICE * choice

    def _states(self, texts: Sequence[HeadText]) -> Tensor:
        """[T, E]: what is expected after each token but the first and the last of each text."""
        device = self._matrix.device
        counts = [len(text.ids) - 2 for text in texts]
        total, lengths = sum(counts), torch.tensor(counts, device=device)
        starts = functional.pad(lengths.cumsum(0), (1, 0))
        first = torch.repeat_interleave(starts[:-1], lengths, output_size=total)
        positions = torch.arange(total, device=device) - first
        embedded = self._embedding[torch.cat([text.ids[1:-1] for text in texts])]
        hidden = torch.cat([text.hidden[:-1] for text in texts])
        starts = starts.to(torch.int32)

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = (part[0] for part in self._layer.turned(qkv, positions[None]))
            return self._attend(q, k, v, starts, max(counts))[None]

        def states(hidden: Tensor) -> Tensor:
            return self._layer.forward(embedded[None], hidden[None], attend)[0]

        with torch.no_grad():
            own = states(hidden).roll(1, 0)
            given = torch.rand(total, generator=self._random).to(device) >= _OWN
        return states(torch.where((given | (positions == 0))[:, None], hidden, own))

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config
