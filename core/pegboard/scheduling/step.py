"""A step while it is being planned."""

from __future__ import annotations

from pegboard.contracts.cache import CacheManager
from pegboard.contracts.scheduler import RowPlan, SchedulerNeed

from .sequence import Sequence


class StepBuilder:
    """Rows of the next step, decode rows before prefill chunks. A row that `add` accepts has its pages."""

    def __init__(self, id: int, need: SchedulerNeed, cache: CacheManager) -> None:
        self.id = id
        #: Tokens and rows that still fit.
        self.tokens_left = need.max_step_tokens
        self.rows_left = need.max_rows
        #: Sequences whose last prompt token is launched by this step.
        self.prompts_done: list[Sequence] = []
        self._reserve = cache.reserve
        self._decode_width = need.decode_width
        self._narrow: list[RowPlan] = []
        self._wide: list[RowPlan] = []
        #: Entries of rows that the device feeds, at most; 0: there are none.
        self.reach = 0

    @property
    def rows(self) -> tuple[RowPlan, ...]:
        return (*self._narrow, *self._wide)

    def add(self, seq: Sequence, query: int, drafts: int = 0) -> bool:
        """Plan `query` queries of a running sequence, the last `drafts` of them drafts. False: no pages; nothing has
        changed. `query - drafts` is at most `seq.wants()`; a sequence is added once. ValueError: it does not run (any
        more): one that was preempted for an earlier row of this step, say."""
        if seq.phase != "running":
            raise ValueError(
                f"{seq.id!r} is {seq.phase} and can't be in a step: ask seq.phase first, after each preempt"
            )
        start = seq.entries + seq.flying_entries
        if seq.flying_samples and query == 1 and not seq.opening_due:
            return self._go_on(seq, start)
        known = query - drafts
        tokens: tuple[int, ...] = ()
        if seq.flying_samples:
            # With drafts in flight the bound may pass max_length, the true entry can't.
            if start >= seq.max_length:
                start = seq.max_length - 1
            samples = True
            self.reach = max(self.reach, start + query)
        else:
            end = start + known
            samples = end == len(seq.tokens)
            tokens = tuple(seq.tokens[start:end])
        if not self._reserve(seq.id, start + query):
            return False
        if not seq.prompt_step and start + known >= seq.prompt_length:
            seq.prompt_step = self.id
            if seq.children:
                self.prompts_done.append(seq)
        targets = self._targets(seq, start, known) if start < seq.prompt_length - 1 else ()
        plan = RowPlan(
            id=seq.id,
            slot=seq.slot,
            query=query,
            start=start,
            tokens=tokens,
            drafts=drafts,
            samples=samples,
            logprobs=seq.spec.sampling.logprobs,
            targets=targets,
            top_targets=(seq.spec.sampling.prompt_logprobs or 0) if targets else 0,
            opening=seq.opening() if seq.opening_due else None,
            epoch=seq.epoch,
        )
        (self._narrow if query <= self._decode_width else self._wide).append(plan)
        seq.opening_due = False
        seq.fence = self.id
        seq.flying += 1
        seq.flying_entries += query
        seq.flying_samples += samples
        self.tokens_left -= query
        self.rows_left -= 1
        return True

    def _go_on(self, seq: Sequence, start: int) -> bool:
        """Most rows: the device feeds one token. Such a row is the same in every step, which spares those who build the
        step from it to look at it again."""
        if start >= seq.max_length:
            start = seq.max_length - 1
        end = start + 1
        if not self._reserve(seq.id, end):
            return False
        plan = seq.going_on
        if plan is None:
            plan = seq.going_on = RowPlan(
                id=seq.id,
                slot=seq.slot,
                query=1,
                start=seq.max_length - 1,
                tokens=(),
                logprobs=seq.spec.sampling.logprobs,
                epoch=seq.epoch,
            )
        self._narrow.append(plan)
        if end > self.reach:
            self.reach = end
        seq.fence = self.id
        seq.flying += 1
        seq.flying_entries += 1
        seq.flying_samples += 1
        self.tokens_left -= 1
        self.rows_left -= 1
        return True

    def planned(self, seq: Sequence) -> bool:
        return seq.fence == self.id

    @staticmethod
    def _targets(seq: Sequence, start: int, known: int) -> tuple[int, ...]:
        """Ids that follow each query, where their log-probability is wanted and not out yet."""
        last = seq.prompt_length - 1
        if seq.scored >= min(start + known, last):
            return ()
        return tuple(
            seq.tokens[entry + 1] if seq.scored <= entry < last else -1 for entry in range(start, start + known)
        )
