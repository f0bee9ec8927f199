"""What speculators may use of the model that they draft for."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.contracts.model import DecoderModel
from pegboard.contracts.ops import Ops
from pegboard.contracts.speculator import DraftTarget


class ModelEnds(DraftTarget):
    """Embedding and head of a model with `shares_ends`, run by the target's own ops; `vocab_limit` as the runner's."""

    def __init__(self, model: DecoderModel, ops: Ops, dtype: torch.dtype, vocab_limit: int) -> None:
        self._model, self._ops, self._dtype, self._vocab_limit = model, ops, dtype, vocab_limit

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def embed(self, ids: Tensor) -> Tensor:
        return self._model.embed(ids, self._ops)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self._model.head(hidden, self._ops)
        if self._vocab_limit < logits.shape[1]:
            logits[:, self._vocab_limit :] = float("-inf")
        return logits
