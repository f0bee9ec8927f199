"""A launched step that has not retired: device results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType

import torch
from torch import Tensor

from pegboard.contracts.sampler import LogprobTensors, TokenLogprobs
from pegboard.contracts.scheduler import RowPlan, RowResult, StepPlan, StepResult

from .adapting import MeasuredStep
from .stepping import Chosen

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
    """`sampled` are the rows that chose tokens, as they ran, in the order of `chosen`."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sequence[RowPlan],
        chosen: Chosen,
        scores: Sequence[tuple[RowPlan, LogprobTensors]],
        host_seconds: float,
        measured: MeasuredStep | None = None,
        failed: Mapping[str, str] = MappingProxyType({}),
        told: Callable[[RowPlan, Sequence[int]], None] | None = None,
    ) -> None:
        """`chosen` may have more entries, of idle rows. `host_seconds`: spent on building the batch. `measured`: of an
        engine with a speculator. `failed`: sequence -> why its row fails. `told` what each row has chosen."""
        self.plan = plan
        self._failed, self._told = failed, told
        self._host_seconds = host_seconds
        self._sampled, self._measured = sampled, measured
        self._scored = [row for row, _ in scores]
        count = len(sampled)
        self._ids = HostCopy([] if chosen.ids is None else [chosen.ids[:count]])
        drafts = chosen.count is not None and chosen.drafted is not None
        self._drafts = HostCopy([chosen.count[:count], chosen.drafted[:count]] if drafts else [])  # type: ignore[index]
        self._logprobs = HostCopy([part[:count] for part in _parts(chosen.logprobs)])
        self._scores = [HostCopy(_parts(tensors)) for _, tensors in scores]

    def result(self) -> StepResult:
        """Waits for the copies."""
        for copy in (self._ids, self._drafts, self._logprobs, *self._scores):
            copy.wait()
        begin = perf_counter()
        plain = self._plain_rows()
        if plain is not None:
            return StepResult(step=self.plan.id, rows=plain, host_seconds=self._host_seconds + perf_counter() - begin)
        chosen, drafted = self._chosen()
        tokens = {row.id: found for row, found in zip(self._sampled, chosen, strict=True)}
        if self._told is not None:
            for row, found in zip(self._sampled, chosen, strict=True):
                self._told(row, found)
        logprobs = self._found_logprobs(chosen)
        prompts = {}
        for row, copy in zip(self._scored, self._scores, strict=True):
            records = _records(row.targets, copy.wait())
            prompts[row.id] = tuple(r for r in records if r.token_id >= 0)
        rows = tuple(_result(row, tokens.get(row.id, ()), logprobs.get(row.id), prompts) for row in self.plan.rows)
        if self._failed:
            rows = tuple(
                RowResult(id=row.id, epoch=row.epoch, error=self._failed[row.id]) if row.id in self._failed else row
                for row in rows
            )
        spent = self._host_seconds + perf_counter() - begin
        report = None
        if self._measured is not None:
            report = self._measured.over(drafted, [len(ids) for ids in chosen])
        return StepResult(step=self.plan.id, rows=rows, host_seconds=spent, drafts=report)

    def _plain_rows(self) -> tuple[RowResult, ...] | None:
        """Of most steps: every row has chosen one token, and nothing else is wanted. None: it is no such step."""
        rows = self.plan.rows
        if self._measured or self._failed or self._told or self._scored or self._logprobs.wait():
            return None
        if len(self._sampled) != len(rows):
            return None
        [ids] = self._ids.wait()
        found: list[int] = ids.tolist()
        if min(found) < 0:
            return None
        return tuple([RowResult(id=row.id, epoch=row.epoch, tokens=(id,)) for row, id in zip(rows, found, strict=True)])

    def _chosen(self) -> tuple[list[list[int]], list[int]]:
        """What each sampled row keeps, and how many drafts each had."""
        ids = [found for tensor in self._ids.wait() for found in tensor.tolist()]
        drafts = self._drafts.wait()
        if not drafts:
            return [[id] for id in ids], []
        count, drafted = (part.tolist() for part in drafts)
        return [row[:length] for row, length in zip(ids, count, strict=True)], drafted

    def _found_logprobs(self, chosen: Sequence[Sequence[int]]) -> dict[str, list[TokenLogprobs]]:
        parts = self._logprobs.wait()
        if not parts:
            return {}
        if len(self._drafts.wait()):
            rows = zip(chosen, *parts, strict=True)
            records = [_records(ids, [part[: len(ids)] for part in own]) for ids, *own in rows]
        else:
            records = [[record] for record in _records([id for ids in chosen for id in ids], parts)]
        return {row.id: found for row, found in zip(self._sampled, records, strict=True)}


def _result(
    row: RowPlan,
    chosen: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None,
    prompts: dict[str, tuple[TokenLogprobs, ...]],
) -> RowResult:
    scored = prompts.get(row.id, ())
    failed = next((id for id in chosen if id < 0), None)
    if failed is not None:
        nan = failed == -1
        error = _NAN if nan else _NOTHING_LEFT
        return RowResult(id=row.id, epoch=row.epoch, prompt_logprobs=scored, error=error, tainted=nan)
    records: tuple[TokenLogprobs, ...] = ()
    if logprobs is not None and row.logprobs is not None:  # the widest wish of the step decides the tensors' width
        records = tuple(TokenLogprobs(found.token_id, found.logprob, found.top[: row.logprobs]) for found in logprobs)
    return RowResult(id=row.id, epoch=row.epoch, tokens=tuple(chosen), logprobs=records, prompt_logprobs=scored)


def _parts(logprobs: LogprobTensors | None) -> list[Tensor]:
    return [] if logprobs is None else [logprobs.chosen, logprobs.top_ids, logprobs.top_values]
