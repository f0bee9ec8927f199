"""The scheduler's record of one sequence. The ledger changes it, policies read it."""

from __future__ import annotations

from typing import Literal

from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.scheduler import RowPlan, SequenceSpec

#: parked: waits for the prompt of its parent; waiting: never ran; preempted: ran, lost its pages, keeps its slot.
Phase = Literal["parked", "waiting", "preempted", "running", "ended"]


class Sequence:
    __slots__ = (
        "cached",
        "children",
        "committed",
        "entries",
        "epoch",
        "fence",
        "flying",
        "flying_entries",
        "flying_samples",
        "going_on",
        "host_chooses",
        "id",
        "key",
        "max_length",
        "needs_host_token",
        "opening_due",
        "paused",
        "phase",
        "preemptions",
        "prompt_length",
        "prompt_step",
        "relies",
        "scored",
        "slot",
        "spec",
        "stop_ids",
        "tokens",
    )

    def __init__(self, spec: SequenceSpec, key: tuple[float, float, int], epoch: int) -> None:
        self.id = spec.id
        self.spec = spec
        self.max_length = spec.max_length
        self.stop_ids = spec.stop_ids
        self.needs_host_token = spec.needs_host_token or spec.host_chooses
        self.host_chooses = spec.host_chooses
        #: Rank in any line, lower first: (rank of the policy, arrival, order of admission).
        self.key = key
        self.epoch = epoch
        self.phase: Phase = "waiting"
        self.paused = False
        self.slot = -1
        #: Prompt and output that the host knows.
        self.tokens: list[int] = list(spec.prompt)
        self.prompt_length = len(spec.prompt)
        #: Entries computed by retired steps, or launched by the parent before a fork.
        self.entries = 0
        #: Of them, those told to the cache.
        self.committed = 0
        #: Rows in flight, the queries of them all, and how many choose a token.
        self.flying = 0
        self.flying_entries = 0
        self.flying_samples = 0
        #: Its row in steps that the device feeds, in this epoch.
        self.going_on: RowPlan | None = None
        #: The last step with a row of it.
        self.fence = 0
        #: The step that launched the last prompt token, 0: not yet.
        self.prompt_step = 0
        #: Steps of the parent that were in flight at the fork: if one fails, so do the entries.
        self.relies: tuple[int, ...] = ()
        self.opening_due = True
        #: Prompt entries whose log-probabilities are out; all of them when none are wanted.
        wanted = spec.sampling.prompt_logprobs is not None and spec.parent is None
        self.scored = 0 if wanted else self.prompt_length - 1
        self.children: list[Sequence] = []
        #: Prompt tokens found in the prefix cache; -1 before the first opening.
        self.cached = -1
        self.preemptions = 0

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def wants(self) -> int:
        """Queries that could run now: known tokens not launched yet, 1 when the device feeds the next one, 0: none."""
        if not self.flying_samples:
            return len(self.tokens) - self.entries - self.flying_entries
        if self.needs_host_token or len(self.tokens) + self.flying_samples >= self.max_length:
            return 0
        return 1

    def drafts(self) -> int:
        """Drafts that a decode row may carry now without passing max_length."""
        drafts = self.spec.max_drafts
        if drafts:
            drafts = max(0, min(drafts, self.max_length - 1 - self.entries - self.flying_entries))
        return drafts

    def opening(self) -> SlotOpening:
        return SlotOpening(
            slot=self.slot,
            sampling=self.spec.sampling,
            seed=self.spec.seed,
            prompt=self.spec.prompt,
            output=tuple(self.tokens[self.prompt_length :]),
            stop_ids=tuple(sorted(self.stop_ids)),
            max_length=self.max_length,
        )
