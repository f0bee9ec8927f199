"""Log-probabilities of chosen tokens and of the most probable ones."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.contracts.sampler import LogprobTensors

from .choice import Candidates, best_first


def of_logits(logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
    """log_softmax of logits [M, V] in float32 (float64 stays) for targets [M] (NaN where negative)."""
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets < 0, torch.nan)
    values, ids = best_first(logprobs, min(top, logits.shape[1]))
    return LogprobTensors(chosen=chosen, top_ids=ids, top_values=values)


def of_candidates(candidates: Candidates, targets: Tensor, top: int, vocab_size: int) -> LogprobTensors:
    """The same under the distribution that the choice was made from; dropped tokens have -inf."""
    scores = candidates.scores.new_full((targets.shape[0], vocab_size), -torch.inf)
    scores.scatter_(1, candidates.ids, candidates.scores)
    found = of_logits(scores, targets, top)
    return LogprobTensors(chosen=found.chosen.float(), top_ids=found.top_ids, top_values=found.top_values.float())


class LogprobBuffer:
    """Collects the rows of a step that ask; the others keep NaN and id -1."""

    def __init__(self, rows: int, top: int, like: Tensor) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._chosen = torch.full((rows,), torch.nan, dtype=dtype, device=like.device)
        self._values = torch.full((rows, top), torch.nan, dtype=dtype, device=like.device)
        self._ids = torch.full((rows, top), -1, dtype=torch.int64, device=like.device)

    def put(self, rows: Tensor, found: LogprobTensors) -> None:
        width = found.top_ids.shape[1]
        self._chosen[rows] = found.chosen.to(self._chosen.dtype)
        self._values[rows, :width] = found.top_values.to(self._values.dtype)
        self._ids[rows, :width] = found.top_ids

    def spread(self, places: Tensor, shape: tuple[int, int]) -> LogprobTensors:
        """As `result`, where row i stands at `places[i]` of the flattened shape; nothing stands elsewhere."""
        wide = LogprobBuffer(shape[0] * shape[1], self._ids.shape[1], self._chosen)
        found = LogprobTensors(chosen=self._chosen, top_ids=self._ids, top_values=self._values)
        wide.put(places, found)
        return wide.result(shape)

    def result(self, shape: tuple[int, ...]) -> LogprobTensors:
        """With the leading dimension given as `shape`."""
        return LogprobTensors(
            chosen=self._chosen.view(shape),
            top_ids=self._ids.view(*shape, -1) if self._ids.shape[1] else self._ids.view(*shape, 0),
            top_values=self._values.view(*shape, -1) if self._values.shape[1] else self._values.view(*shape, 0),
        )
