"""A runner that lets every N-th step be run by parts with their references beside them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pegboard.contracts.attention import AttentionBackend
from pegboard.contracts.ops import Ops
from pegboard.contracts.sampler import Sampler
from pegboard.contracts.scheduler import StepPlan, StepResult
from pegboard.runner.model_runner import ModelRunner
from pegboard.runner.stepping import RunnerParts
from pegboard.runner.tickets import Ticket

from .attention import BesideAttention
from .log import Findings, ShadowLog
from .ops import BesideOps
from .sampler import BesideSampler


class References:
    """The parts to compare with, already created; None: this one is not shadowed."""

    def __init__(
        self,
        *,
        prefill: AttentionBackend[Any] | None = None,
        decode: AttentionBackend[Any] | None = None,
        ops: Ops | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.prefill, self.decode, self.ops, self.sampler = prefill, decode, ops, sampler


class ShadowTicket:
    def __init__(self, ticket: Ticket, findings: Findings) -> None:
        self._ticket, self._findings = ticket, findings

    def result(self) -> StepResult:
        """With what was found."""
        return replace(self._ticket.result(), shadow=self._findings.checks())


class ShadowRunner:
    """Steps 1, 1 + every, 1 + 2 * every, ... are compared. The others run by the parts as they are; only a shadowed
    sampler remembers what it chose in each."""

    def __init__(self, plain: ModelRunner, references: References, every: int, tolerance: float | None) -> None:
        self._log, self._every = ShadowLog(tolerance), every
        log, parts, device = self._log, plain.parts, plain.device
        layers = {id(cache): layer for layer, cache in enumerate(plain.caches)}
        sampler, ops, prefill, decode = parts.sampler, parts.ops, parts.prefill, parts.decode
        if references.sampler is not None:
            sampler = BesideSampler(sampler, references.sampler, log)
            plain = plain.with_parts(parts.replace(sampler=sampler))
        if references.ops is not None:
            ops = BesideOps(ops, references.ops, log, layers)
        if references.prefill is not None and references.decode is not None:
            prefill = BesideAttention("attention", prefill, references.prefill, log, layers, device)
            decode = BesideAttention("decode_attention", decode, references.decode, log, layers, device)
        self._plain = plain
        compared: RunnerParts = parts.replace(sampler=sampler, ops=ops, prefill=prefill, decode=decode)
        self._compared = plain.with_parts(compared)

    def launch(self, plan: StepPlan) -> Ticket | ShadowTicket:
        if (plan.id - 1) % self._every:
            return self._plain.launch(plan)
        self._log.begin()
        try:
            ticket = self._compared.launch(plan)
        finally:
            findings = self._log.end()
        return ShadowTicket(ticket, findings)

    @property
    def cache_bytes(self) -> int:
        return self._plain.cache_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._plain.workspace_bytes
