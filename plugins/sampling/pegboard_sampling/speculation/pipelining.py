"""Drafting on another device than the target's, while the target verifies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator

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
        #: What recorded passes take their rows from, and what those have kept.
        self._rows = torch.zeros(_padded(slots), dtype=torch.int64, device=passes.device)
        self._kept = torch.zeros(len(self._rows), passes.most, dtype=torch.int64, device=passes.device)
        self._pace = Pace() if ahead else None

    @contextlib.contextmanager
    def current(self) -> Iterator[torch.cuda.Stream | None]:
        """Behind what the target's stream has been given so far; gives that stream."""
        target = torch.cuda.current_stream(self._home) if self._home.type == "cuda" else None
        if target is not None:
            self._stream.wait_stream(target)
        with torch.cuda.stream(self._stream):
            yield target

    def propose(self, slots: Tensor, count: int) -> Drafts:
        passes, pace = self._passes, self._pace
        with self.current() as target:
            rows = self._take(slots)
            if pace is not None:
                pace.arrived()
            there = int(passes.standing(rows[: len(slots)]).min()) if pace is not None and pace.ahead else 0
            probs = None
            if not there:
                probs = self._run(("draft", count), rows, lambda: passes.draft(rows, count))
            elif there < count:
                self._draft_on(rows, there, count)
            if pace is not None:
                pace.drafted(count - min(there, count))
            found = self._send(passes.standing_ids(rows[: len(slots)], count))
            sent = None if probs is None else self._send(probs[: len(slots)])
            self._let_go(target)
            if pace is not None:
                first = max(there, count)
                last = min(first + pace.ahead, passes.most)
                if first < last:
                    self._draft_on(rows, first, last)
                pace.ended()
        return Drafts(ids=found, probs=sent)

    def observe(self, slots: Tensor, ids: Tensor) -> None:
        """ids [R, m], -1 beyond what was kept."""
        with self.current() as target:
            rows = self._take(slots)
            kept = self._kept[: len(rows), : ids.shape[1]]
            kept.fill_(-1)
            kept[: len(slots)].copy_(ids, non_blocking=True)
            self._let_go(target)
            self._run(("observe", ids.shape[1]), rows, lambda: self._passes.observe(rows, kept, (kept >= 0).sum(1)))

    def _draft_on(self, rows: Tensor, start: int, stop: int) -> None:
        def work() -> None:
            self._passes.draft_on(rows, start, stop)

        self._run(("on", start, stop), rows, work)

    def _take(self, slots: Tensor) -> Tensor:
        """Filled up with idle ones, where recorded passes find them."""
        rows = self._rows[: _padded(len(slots))]
        rows.fill_(self._idle)
        rows[: len(slots)].copy_(slots, non_blocking=True)
        return rows

    def _run(self, key: Hashable, rows: Tensor, work: Callable[[], Tensor | None]) -> Tensor | None:
        return work() if self._recordings is None else self._recordings.run((key, len(rows)), work)

    def _let_go(self, target: torch.cuda.Stream | None) -> None:
        """It goes on behind what this stream has been given so far."""
        if target is not None:
            target.wait_event(self._stream.record_event())

    def _send(self, x: Tensor) -> Tensor:
        return x.to(self._home, non_blocking=self._home.type == "cuda")


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
