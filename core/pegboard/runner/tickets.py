"""A launched step that has not retired: device results on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from types import MappingProxyType

import torch
from torch import Tensor

from pegboard.contracts.sampler import LogprobTensors, TokenLogprobs
from pegboard.contracts.scheduler import RowPlan, RowResult, StepPlan, StepResult

_NAN = "the model's logits hold NaN"
_NOTHING_LEFT = "no token was left to choose from: every one is masked by bias, min_tokens or the model"


class HostCopy:
    """Tensors copied to the host; `wait` returns them. On CUDA through pinned memory and one event."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))
        else:
            self._tensors = list(tensors)

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _records(ids: Sequence[int], parts: Sequence[Tensor]) -> list[TokenLogprobs]:
    """parts: chosen [N], top ids [N, m], top values [N, m]"""
    chosen, top_ids, top_values = (part.tolist() for part in parts)
    return [
        TokenLogprobs(token, logprob, tuple(zip(names, values, strict=True)))
        for token, logprob, names, values in zip(ids, chosen, top_ids, top_values, strict=True)
    ]


class Ticket:
    """`sampled` are the plan's rows that chose a token, in the order of `ids` [N]."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sequence[RowPlan],
        ids: Tensor | None,
        logprobs: LogprobTensors | None,
        scores: Sequence[tuple[RowPlan, LogprobTensors]],
        host_seconds: float,
        failed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """ids and logprobs may have more entries, of idle rows. `host_seconds`: spent on building the batch. `failed`:
        sequence -> why its row fails."""
        self.plan = plan
        self._failed = failed
        self._host_seconds = host_seconds
        self._sampled = sampled
        self._scored = [row for row, _ in scores]
        self._ids = HostCopy([] if ids is None else [ids[: len(sampled)]])
        self._logprobs = HostCopy([part[: len(sampled)] for part in _parts(logprobs)])
        self._scores = [HostCopy(_parts(tensors)) for _, tensors in scores]

    def result(self) -> StepResult:
        """Waits for the copies."""
        for copy in (self._ids, self._logprobs, *self._scores):
            copy.wait()
        begin = perf_counter()
        chosen = [int(i) for tensor in self._ids.wait() for i in tensor.tolist()]
        tokens = {row.id: token for row, token in zip(self._sampled, chosen, strict=True)}
        parts = self._logprobs.wait()
        logprobs = dict(zip(tokens, _records(chosen, parts), strict=True)) if parts else {}
        prompts = {}
        for row, copy in zip(self._scored, self._scores, strict=True):
            records = _records(row.targets, copy.wait())
            prompts[row.id] = tuple(r for r in records if r.token_id >= 0)
        rows = tuple(self._row(row, tokens.get(row.id), logprobs.get(row.id), prompts) for row in self.plan.rows)
        if self._failed:
            rows = tuple(
                RowResult(id=row.id, epoch=row.epoch, error=self._failed[row.id]) if row.id in self._failed else row
                for row in rows
            )
        spent = self._host_seconds + perf_counter() - begin
        return StepResult(step=self.plan.id, rows=rows, host_seconds=spent)

    @staticmethod
    def _row(
        row: RowPlan,
        token: int | None,
        logprob: TokenLogprobs | None,
        prompts: dict[str, tuple[TokenLogprobs, ...]],
    ) -> RowResult:
        scored = prompts.get(row.id, ())
        if token is None:
            return RowResult(id=row.id, epoch=row.epoch, prompt_logprobs=scored)
        if token < 0:
            nan = token == -1
            error = _NAN if nan else _NOTHING_LEFT
            return RowResult(id=row.id, epoch=row.epoch, prompt_logprobs=scored, error=error, tainted=nan)
        records: tuple[TokenLogprobs, ...] = ()
        if logprob is not None and row.logprobs is not None:  # the widest wish of the step decides the tensors' width
            records = (TokenLogprobs(logprob.token_id, logprob.logprob, logprob.top[: row.logprobs]),)
        return RowResult(
            id=row.id,
            epoch=row.epoch,
            tokens=(token,),
            logprobs=records,
            prompt_logprobs=scored,
        )


def _parts(logprobs: LogprobTensors | None) -> list[Tensor]:
    return [] if logprobs is None else [logprobs.chosen, logprobs.top_ids, logprobs.top_values]
