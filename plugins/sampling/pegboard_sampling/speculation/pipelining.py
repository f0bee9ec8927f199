"""Drafting on another device than the target's, while the target verifies."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from pegboard.contracts.speculator import Drafts
from pegboard.runner.recording import Recordings

from .draft_passes import DraftPasses
from .pace import Pace


class Pipeline:
    """Has a stream of its own, in which recorded passes are replayed. When a step's drafts are on their way it drafts
    on behind them, as many passes as the target's verification takes: one for the token that the target adds, others
    for the next step, which then need not be waited for. Rows that went on in another way are drafted for anew, all of
    a step together.

    Whether drafts stand is asked on the host, which waits for the target's last step there; where nothing is drafted
    ahead nobody waits. `ahead`: not where distributions of drafts are wanted."""

    def __init__(self, passes: DraftPasses, home: torch.device, slots: int, *, ahead: bool) -> None:
        """`slots`: the last of them is of idle rows."""
        self._passes, self._home, self._idle = passes, home, slots - 1
        self._stream = torch.cuda.Stream(passes.device)  # type: ignore[no-untyped-call]
        self._recordings = Recordings() if passes.capturable else None
        #: What recorded passes take their rows from.
        self._rows = torch.zeros(_padded(slots), dtype=torch.int64, device=passes.device)
        self._pace = Pace() if ahead else None

    def current(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._stream)

    def propose(self, slots: Tensor, count: int) -> Drafts:
        passes, pace = self._passes, self._pace
        with self.current():
            slots = slots.to(passes.device, non_blocking=True)
            if pace is not None:
                pace.arrived()
            there = int(passes.standing(slots).min()) if pace is not None and pace.ahead else 0
            probs = None
            if not there:
                probs = self._run(slots, ("draft", count), lambda rows: passes.draft(rows, count))
            elif there < count:
                self._draft_on(slots, there, count)
            if pace is not None:
                pace.drafted(count - min(there, count))
            found = self._send(passes.standing_ids(slots, count))
            sent = None if probs is None else self._send(probs[: len(slots)])
            if pace is not None:
                first = max(there, count)
                last = min(first + pace.ahead, passes.most)
                if first < last:
                    self._draft_on(slots, first, last)
                pace.ended()
        return Drafts(ids=found, probs=sent)

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        device = self._passes.device
        with self.current():
            self._passes.observe(*(part.to(device, non_blocking=True) for part in (slots, ids, count)))

    def _draft_on(self, slots: Tensor, start: int, stop: int) -> None:
        def work(rows: Tensor) -> None:
            self._passes.draft_on(rows, start, stop)

        self._run(slots, ("on", start, stop), work)

    def _run(self, slots: Tensor, key: Hashable, work: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        if self._recordings is None:
            return work(slots)
        rows = self._rows[: _padded(len(slots))]
        rows.fill_(self._idle)
        rows[: len(slots)].copy_(slots)
        return self._recordings.run((key, len(rows)), lambda: work(rows))

    def _send(self, x: Tensor) -> Tensor:
        return x.to(self._home, non_blocking=self._home.type == "cuda")


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
