"""What the comparisons of one step gave: on the device until the step retires."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pegboard.contracts.shadow import ShadowCheck
from pegboard.runner.tickets import HostCopy
from pegboard.tolerances import TOLERANCES, Tolerance, absolute_error, root_mean_square

logger = logging.getLogger("pegboard")

T = TypeVar("T")

#: Rounding of a value that was stored as an integer.
_INTEGER = Tolerance(1.0, 0.0)


class Findings:
    """Errors of one step: (worst as a multiple of the tolerance, greatest absolute) for each label."""

    def __init__(self) -> None:
        self.labels: list[tuple[str, str]] = []
        self.errors: list[Tensor] = []
        self.failures: dict[str, str] = {}
        self._copy: HostCopy | None = None

    def leave(self) -> None:
        """All is launched: begin the copy to the host."""
        self._copy = HostCopy([torch.cat(self.errors)] if self.errors else [])

    def checks(self) -> tuple[ShadowCheck, ...]:
        """One a part, waiting for the device."""
        assert self._copy is not None  # `leave` came first
        found = [row for tensor in self._copy.wait() for row in tensor.tolist()]
        return tuple(self._check(part, found) for part in dict.fromkeys([*(p for p, _ in self.labels), *self.failures]))

    def _check(self, part: str, found: list[list[float]]) -> ShadowCheck:
        own = [(where, row) for (name, where), row in zip(self.labels, found, strict=True) if name == part]
        differing = [where for where, (worst, _) in own if not worst <= 1]
        return ShadowCheck(
            part=part,
            compared=len(own),
            differing=len(differing),
            max_abs=max((absolute for _, (_, absolute) in own), default=0.0),
            worst=max((worst for _, (worst, _) in own), default=0.0),
            first=differing[0] if differing else "",
            error=self.failures.get(part),
        )


class ShadowLog:
    """Where shadowed parts of one runner put what they find. `active` only while a step is compared."""

    def __init__(self, tolerance: float | None) -> None:
        """`tolerance` stands for that of the dtype, absolute and relative."""
        self.active = False
        self._tolerance = None if tolerance is None else Tolerance(tolerance, tolerance)
        self._findings = Findings()
        self._calls: Counter[str] = Counter()

    def begin(self) -> None:
        self.active, self._findings, self._calls = True, Findings(), Counter()

    def end(self) -> Findings:
        self.active = False
        self._findings.leave()
        return self._findings

    def run(self, part: str, reference: Callable[[], T]) -> T | None:
        """What the reference gives; None when it raises, which is noted and harms nobody."""
        if part in self._findings.failures:
            return None
        try:
            return reference()
        except Exception as error:
            logger.warning("the reference of %s raised in shadow mode", part, exc_info=error)
            self._findings.failures[part] = f"{type(error).__name__}: {error}"
            return None

    def nth(self, what: str) -> str:
        """`what` with how often it came before in this step."""
        self._calls[what] += 1
        return f"{what} {self._calls[what] - 1}"

    def compare(self, part: str, where: str, found: Tensor, reference: Tensor) -> None:
        """Tolerated: absolute * max(1, root mean square of the reference) + relative * |reference|."""
        if found.shape != reference.shape or found.dtype != reference.dtype:
            shapes = [f"{tuple(t.shape)} {t.dtype}" for t in (found, reference)]
            self._findings.failures.setdefault(part, f"{where}: {shapes[0]}, and the reference gives {shapes[1]}")
            return
        if not found.numel():
            return
        tolerance = self._tolerance_of(found.dtype)
        error = absolute_error(found, reference)
        size = reference.double().abs().nan_to_num(nan=0.0, posinf=0.0)
        scale = root_mean_square(reference).clamp(min=1.0)
        worst = (error / (tolerance.absolute * scale + tolerance.relative * size)).amax()
        self._put(part, [where], torch.stack((worst, error.amax()))[None])

    def compare_ids(self, part: str, rows: list[str], found: Tensor, reference: Tensor) -> None:
        """Tokens [N] or [N, k], a row each of `rows`."""
        other = (found != reference).flatten(1).any(1) if found.dim() > 1 else found != reference
        worst = torch.where(other, math.inf, 0.0).double()
        self._put(part, rows, torch.stack((worst, torch.zeros_like(worst)), dim=1))

    def _put(self, part: str, rows: list[str], errors: Tensor) -> None:
        self._findings.labels += [(part, where) for where in rows]
        self._findings.errors.append(errors)

    def _tolerance_of(self, dtype: torch.dtype) -> Tolerance:
        name = str(dtype).removeprefix("torch.")
        return self._tolerance or TOLERANCES.get(name, _INTEGER)
