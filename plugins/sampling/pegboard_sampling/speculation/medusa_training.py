"""Medusa-1 heads as they are trained: the target stays as it is, its output matrix is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.contracts.speculator import HeadText, HeadTrainer, HeadTraining

from .choosing_loss import candidates, choice_loss
from .medusa_heads import MedusaHeads

#: Weight of each head's loss in that of the one before, as the paper has it.
_DECAY = 0.8


class MedusaTrainer(HeadTrainer):
    """One block a head, zero at first, so that each begins as the target's own choice of the next token. Head i learns
    the target's first choice i + 1 places further on."""

    def __init__(self, training: HeadTraining) -> None:
        self._matrix, self._count = training.head, training.drafts
        self._random = torch.Generator().manual_seed(training.seed)
        size = training.target.hidden_size
        weight = torch.zeros(training.drafts, size, size, device=training.head.device)
        bias = torch.zeros(training.drafts, 1, size, device=training.head.device)
        self._heads = MedusaHeads([weight.requires_grad_()], [bias.requires_grad_()], None)

    @property
    def parameters(self) -> Sequence[Tensor]:
        return (*self._heads.weights, *self._heads.biases)

    def loss(self, texts: Sequence[HeadText]) -> Tensor:
        among = candidates(torch.cat([text.greedy for text in texts]), self._matrix.shape[0], self._random)
        matrix = self._matrix[among]
        states = self._heads.states(torch.cat([text.hidden for text in texts]), self._count)
        total = torch.zeros((), device=matrix.device)
        for head in range(self._count):
            parts = torch.split(states[head], [len(text.greedy) for text in texts])
            learnt = torch.cat([part[: -1 - head] for part in parts])
            expected = torch.cat([text.greedy[1 + head :] for text in texts])
            total = total + _DECAY**head * choice_loss(learnt, expected, matrix, among)
        return total

    def weights(self) -> Mapping[str, Tensor]:
        [weight], [bias] = self._heads.weights, self._heads.biases
        named = {f"{head}.0.linear.weight": weight[head] for head in range(self._count)}
        return named | {f"{head}.0.linear.bias": bias[head, 0] for head in range(self._count)}

    @property
    def config(self) -> Mapping[str, Any]:
        return {"medusa_num_heads": self._count, "medusa_num_layers": 1}
