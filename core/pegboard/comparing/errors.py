"""Errors of what was recorded, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..tolerances import absolute_error
from .probe import Key
from .report import PartError

_SAMPLER, _LOGITS = Key(None, "sampler", "sampler"), Key(None, "logits", "logits")


class Errors:
    """Added up over prompts: of each part the worst."""

    def __init__(self, tolerance: float, *, greedy: bool) -> None:
        self._tolerance, self._greedy = tolerance, greedy
        self._worst: dict[Key, PartError] = {}
        #: Choices that differ because the logits do, by less than is tolerated.
        self.ties = 0

    def add(self, prompt: int, a: Mapping[Key, Tensor], b: Mapping[Key, Tensor]) -> None:
        for key in [*a, *(key for key in b if key not in a)]:
            if key == _SAMPLER:
                absolute, relative = self._choices(a, b)
                differs = relative > 0
            else:
                absolute, relative = error_of(a.get(key), b.get(key))
                differs = not relative <= self._tolerance
            known = self._worst.get(key)
            if known is None or (differs, relative) > (known.differs, known.relative):
                self._worst[key] = PartError(
                    layer=key.layer,
                    part=key.part,
                    name=key.name,
                    max_abs=max(absolute, known.max_abs) if known else absolute,
                    relative=relative,
                    differs=differs,
                    prompt=prompt,
                )

    def parts(self) -> list[PartError]:
        return list(self._worst.values())

    def _choices(self, a: Mapping[Key, Tensor], b: Mapping[Key, Tensor]) -> tuple[float, float]:
        """(0, share of the choices that differ and that the logits' own errors don't explain)

        Greedy: explained when A's logits of the two tokens are no further apart than twice the row's error. With noise:
        when the row's logits differ at all."""
        ids, others = a[_SAMPLER], b[_SAMPLER]
        logits, other_logits = a[_LOGITS], b[_LOGITS]
        unexplained = 0
        for row in (ids != others).nonzero().flatten().tolist():
            error = absolute_error(other_logits[row], logits[row]).amax().item()
            pair = logits[row, [int(ids[row]), int(others[row])]].double()
            gap = abs((pair[0] - pair[1]).item())
            explained = gap <= 2 * error if self._greedy else error > 0
            if not explained:
                unexplained += 1
            elif error_of(logits[row : row + 1], other_logits[row : row + 1])[1] <= self._tolerance:
                self.ties += 1
        return 0.0, unexplained / max(len(ids), 1)


def error_of(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """(max |b - a|, max |b - a|_2 / |a|_2 of a row); infinite where one is missing or of another shape."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf, math.inf
    if not a.numel():
        return 0.0, 0.0
    error = absolute_error(b, a).flatten(1)
    size = a.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).flatten(1).norm(dim=1)
    norm = error.norm(dim=1)
    relative = torch.where(norm == 0, 0.0, norm / size)
    return error.amax().item(), relative.amax().item()
