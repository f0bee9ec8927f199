"""Attention of texts that heads are trained on: the engine's own where it has gradients, else torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.attention import AttentionLayer, TextAttention
from ..contracts.device import DeviceFacts
from ..errors import ConfigError
from ..selection import Selection


def text_attention(selection: Selection, device: DeviceFacts) -> Callable[[AttentionLayer], TextAttention]:
    """From the part that the engine's prompts have."""

    def of(layer: AttentionLayer) -> TextAttention:
        return selection.ask("attention", "differentiable", device, layer) or attend_in_torch(layer)

    return of


def attend_in_torch(layer: AttentionLayer) -> TextAttention:
    """Text by text, on any device."""
    if layer.window is not None or layer.softcap is not None or layer.sinks:
        raise ConfigError("heads whose attention has a window, a soft cap or sinks can't be trained here")
    return partial(_attend, scale=layer.scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, *, scale: float) -> Tensor:
    lengths = starts.diff().tolist()
    texts = zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_attend_one(q, k, v, scale) for q, k, v in texts])


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # heads first
    mixed = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed[0].transpose(0, 1)
