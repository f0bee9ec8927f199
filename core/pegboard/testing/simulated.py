"""A device without a model that runs ahead of the host and checks everything it is told.

Entries hold a digest of the token history up to them, as a real K/V vector depends on all tokens before it. Each query
checks every entry that it may see, so a wrong, stale, stolen or uncopied page is caught when it is read. Tokens are a
function of history and seed alone: outputs must not depend on scheduling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from pegboard.contracts.cache import CacheGroup, CacheNeed
from pegboard.contracts.sampler import SlotOpening, TokenLogprobs
from pegboard.contracts.scheduler import (
    FinishReason,
    Progress,
    RowPlan,
    RowResult,
    Scheduler,
    SequenceSpec,
    StepPlan,
    StepResult,
)

_START = 0x5EED
#: What a row writes whose entries count for nothing.
_GARBAGE = -1


def extend_history(digest: int, token: int) -> int:
    """Digest of a history and one token more."""
    return hash((digest, token))


def next_token(digest: int, seed: int, vocab: int, banned: frozenset[int] = frozenset()) -> int:
    """The token that follows a history: any function would do that spreads well."""
    attempt = 0
    while True:
        token = hash((digest, seed, attempt)) % vocab
        if token not in banned:
            return token
        attempt += 1


def reference(spec: SequenceSpec, vocab: int) -> tuple[tuple[int, ...], FinishReason]:
    """Output and finish reason of a sequence that runs alone, token by token."""
    digest = _START
    for token in spec.prompt:
        digest = extend_history(digest, token)
    output: list[int] = []
    while True:
        banned = spec.stop_ids if len(output) < spec.sampling.min_tokens else frozenset()
        token = next_token(digest, spec.seed, vocab, banned)
        digest = extend_history(digest, token)
        output.append(token)
        if token in spec.stop_ids:
            return tuple(output), "stop"
        if len(spec.prompt) + len(output) == spec.max_length:
            return tuple(output), "length"


class _Slot:
    """Device state of one slot: the true history and length, whatever the host believes."""

    def __init__(self, opening: SlotOpening) -> None:
        self.opening = opening
        self.tokens = [*opening.prompt, *opening.output]
        self.digests: list[int] = []
        #: Entries in the cache; -1: the first row after the opening says.
        self.length = -1
        self.done = False
        self._digest_all()

    def _digest_all(self) -> None:
        digest = self.digests[-1] if self.digests else _START
        for token in self.tokens[len(self.digests) :]:
            digest = extend_history(digest, token)
            self.digests.append(digest)

    def choose(self, digest: int, output: int, vocab: int) -> int:
        banned = self.opening.stop_ids if output < self.opening.sampling.min_tokens else ()
        return next_token(digest, self.opening.seed, vocab, frozenset(banned))

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._digest_all()
        self.done = token in self.opening.stop_ids or len(self.tokens) >= self.opening.max_length

    @property
    def output(self) -> int:
        return len(self.tokens) - len(self.opening.prompt)


class SimulatedDevice:
    """Launch and retire like an executor. Raises AssertionError when a plan is wrong.

    Work is done in launch order and reported when a step retires, so the host learns tokens late by the depth. A row of
    a sequence that ended on the device still writes, into its own reserved entries, as a real one may.
    """

    def __init__(
        self,
        need: CacheNeed,
        pages: Sequence[int],
        *,
        vocab: int = 64,
        acceptance: float = 0.6,
        random: Random | None = None,
    ) -> None:
        """`acceptance`: share of drafts that are right, drawn from `random`."""
        self._groups: tuple[CacheGroup, ...] = need.groups
        self._size = need.page_size
        self._vocab = vocab
        self._acceptance = acceptance
        self._random = random or Random(0)
        #: Per group, page -> digests by offset; a state page has one.
        self._content: list[list[list[int]]] = [
            [[0] * (1 if group.kind == "state" else self._size) for _ in range(n)]
            for group, n in zip(self._groups, pages, strict=True)
        ]
        self._tables: dict[tuple[int, int], list[int]] = {}
        self._slots: dict[int, _Slot] = {}
        self._flights: deque[tuple[StepResult, dict[tuple[int, int], set[tuple[str, int]]]]] = deque()
        self._last_step = 0
        #: Rows and queries run so far.
        self.rows = 0
        self.queries = 0

    @property
    def flying(self) -> int:
        return len(self._flights)

    def launch(self, plan: StepPlan) -> None:
        _check(plan.id > self._last_step, f"step {plan.id} after {self._last_step}")
        self._last_step = plan.id
        _check(len({row.id for row in plan.rows}) == len(plan.rows), "a sequence appears twice")
        _check(len({row.slot for row in plan.rows}) == len(plan.rows), "a slot appears twice")
        for copy in plan.copies:
            self._check_unnamed(copy.group, copy.target, None)
            self._content[copy.group][copy.target] = self._content[copy.group][copy.source].copy()
        for update in plan.tables:
            table = self._tables.setdefault((update.slot, update.group), [])
            _check(update.start <= len(table), f"slot {update.slot}: a hole before page {update.start}")
            # From the first page on it is another life's
            table[update.start : update.start + len(update.pages) if update.start else None] = update.pages
        named: dict[tuple[int, int], set[tuple[str, int]]] = {}
        # All rows write before any reads: in a layer, the cache is written for the whole step first.
        spans = [self._write(row) for row in plan.rows]
        results = tuple(self._read(row, start) for row, start in zip(plan.rows, spans, strict=True))
        for row, start in zip(plan.rows, spans, strict=True):
            end = row.start + row.query
            if not row.tokens and plan.reach is not None:
                grown = self._slots[row.slot].done or start + row.query <= plan.reach
                _check(grown, f"{row.id!r}: {start + row.query} entries, the step's reach is {plan.reach}")
                end = min(end, plan.reach)
            self._name(row, start, end, named)
        self._flights.append((StepResult(step=plan.id, rows=results), named))

    def retire(self, depth: int) -> StepResult | None:
        if len(self._flights) <= depth:
            return None
        return self._flights.popleft()[0]

    def lose(self) -> int:
        """The oldest step raises instead of retiring; its id."""
        return self._flights.popleft()[0].step

    # -- one row -----------------------------------------------------------------------------------------------------

    def _write(self, row: RowPlan) -> int:
        """Bring the slot up to date and write the row's entries; where they start."""
        if row.opening is not None:
            _check(row.opening.slot == row.slot, f"{row.id!r}: an opening of another slot")
            self._slots[row.slot] = _Slot(row.opening)
        slot = self._slots[row.slot]
        known = row.query - row.drafts
        if row.tokens:
            if slot.length < 0:
                slot.length = row.start
            _check(slot.done or row.start == slot.length, f"{row.id!r}: starts at {row.start}, not {slot.length}")
            right = slot.tokens[row.start : row.start + known]
            _check(list(row.tokens) == right, f"{row.id!r}: tokens {row.tokens} are not {right}")
            _check(row.samples == (row.start + known == len(slot.tokens)), f"{row.id!r}: samples={row.samples}")
        else:
            _check(known == 1 and row.samples, f"{row.id!r}: a row that the device feeds has one known query")
            _check(0 <= slot.length <= row.start, f"{row.id!r}: bound {row.start} is below {slot.length}")
        start = slot.length
        digests = [_GARBAGE] * row.query
        if not slot.done:
            _check(start + known <= len(slot.tokens), f"{row.id!r}: runs past what is known")
            digests = slot.digests[start : start + known]
            self._drafts(slot, digests, row.drafts)
        for g, group in enumerate(self._groups):
            if group.kind == "state":
                continue
            for place, digest in enumerate(digests):
                entry = start + place
                page = self._page(row, g, entry)
                if entry % self._size == 0:
                    self._check_unnamed(g, page, row)
                self._content[g][page][entry % self._size] = digest
        self.rows += 1
        self.queries += row.query
        return start

    def _drafts(self, slot: _Slot, digests: list[int], drafts: int) -> None:
        """Append the digests of drafts, some of them wrong; once one is wrong so are all after it."""
        digest = digests[-1]
        for place in range(drafts):
            token = slot.choose(digest, slot.output + place, self._vocab)
            if self._random.random() >= self._acceptance:
                token += self._vocab
            digest = extend_history(digest, token)
            digests.append(digest)

    def _read(self, row: RowPlan, start: int) -> RowResult:
        slot = self._slots[row.slot]
        if slot.done:
            return RowResult(id=row.id, epoch=row.epoch)
        known = row.query - row.drafts
        for g, group in enumerate(self._groups):
            if group.kind == "state":
                self._run_state(row, g, start, slot)
                continue
            low = 0 if group.window is None else max(0, start - group.window + 1)
            while low < start + known:  # a page at a time: most of a suite's time goes by here
                end, place = min(start + known, low - low % self._size + self._size), low % self._size
                held = self._content[g][self._page(row, g, low)][place : place + end - low]
                if held != slot.digests[low:end]:
                    entry = next(e for e in range(low, end) if held[e - low] != slot.digests[e])
                    raise AssertionError(f"{row.id!r}: group {g}, entry {entry} holds something else")
                low = end
        slot.length = start + known
        scores = tuple(
            TokenLogprobs(target, -float(start + place)) for place, target in enumerate(row.targets) if target >= 0
        )
        tokens = self._sample(row, slot, start) if row.samples else ()
        wanted = slot.opening.sampling.logprobs is not None
        logprobs = tuple(TokenLogprobs(token, -1.0) for token in tokens) if wanted else ()
        return RowResult(id=row.id, epoch=row.epoch, tokens=tokens, logprobs=logprobs, prompt_logprobs=scores)

    def _sample(self, row: RowPlan, slot: _Slot, start: int) -> tuple[int, ...]:
        """One token, and one more for each draft that was right, up to the end of the sequence."""
        tokens: list[int] = []
        paged = next((g for g, group in enumerate(self._groups) if group.kind != "state"), None)
        while True:
            token = slot.choose(slot.digests[-1], slot.output, self._vocab)
            slot.append(token)
            tokens.append(token)
            if slot.done or len(tokens) > row.drafts or paged is None:
                return tuple(tokens)
            entry = start + len(tokens)
            if self._content[paged][self._page(row, paged, entry)][entry % self._size] != slot.digests[entry]:
                return tuple(tokens)
            slot.length += 1

    def _run_state(self, row: RowPlan, g: int, start: int, slot: _Slot) -> None:
        state = self._content[g][self._page(row, g, 0)]
        if start:
            _check(state[0] == slot.digests[start - 1], f"{row.id!r}: group {g} holds the state of something else")
        state[0] = slot.digests[start + row.query - 1]

    # -- pages -------------------------------------------------------------------------------------------------------

    def _page(self, row: RowPlan, g: int, entry: int) -> int:
        table = self._tables.get((row.slot, g), [])
        place = entry // self._size
        _check(place < len(table) and table[place] > 0, f"{row.id!r}: group {g} has no page for entry {entry}")
        return table[place]

    def _name(self, row: RowPlan, start: int, end: int, named: dict[tuple[int, int], set[tuple[str, int]]]) -> None:
        """Note the pages that the step may touch for this row, up to `end`, the host's bound."""
        for g, group in enumerate(self._groups):
            if group.kind == "state":
                pages = self._tables[row.slot, g][:1]
            else:
                low = 0 if group.window is None else max(0, start - group.window + 1)
                pages = self._tables[row.slot, g][low // self._size : (end - 1) // self._size + 1]
            for page in pages:
                named.setdefault((g, page), set()).add((row.id, row.epoch))

    def _check_unnamed(self, g: int, page: int, row: RowPlan | None) -> None:
        """A page that begins a new life must not be named by a step that still flies."""
        _check(0 < page < len(self._content[g]), f"group {g}: page {page} does not exist")
        owner = None if row is None else (row.id, row.epoch)
        for result, named in self._flights:
            others = named.get((g, page), set()) - {owner}
            _check(not others, f"group {g}: page {page} came back while step {result.step} names it for {others}")


def _check(right: bool, message: str) -> None:
    if not right:
        raise AssertionError(message)


def run_step(scheduler: Scheduler, device: SimulatedDevice, depth: int) -> tuple[Progress, ...]:
    """One step of an engine that runs `depth` ahead."""
    plan = scheduler.schedule()
    if plan is not None:
        device.launch(plan)
    return scheduler.commit(device.retire(depth if plan is not None else 0))


def run_all(
    scheduler: Scheduler,
    device: SimulatedDevice,
    depth: int,
    *,
    each: Callable[[], None] | None = None,
    limit: int = 100_000,
) -> dict[str, tuple[tuple[int, ...], FinishReason]]:
    """Run until nothing is left; tokens and finish reason by sequence. `each` runs after every step."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    for _ in range(limit):
        if not scheduler.has_work() and not device.flying:
            return {name: (tuple(tokens[name]), reason) for name, reason in ends.items()}
        for progress in run_step(scheduler, device, depth):
            tokens.setdefault(progress.id, []).extend(progress.tokens)
            if progress.finish_reason is not None:
                _check(progress.id not in ends, f"{progress.id!r} ended twice")
                ends[progress.id] = progress.finish_reason
        if each is not None:
            each()
    raise AssertionError(f"still at work after {limit} steps: {scheduler.stats()}")
