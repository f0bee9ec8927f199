"""A scheduler in use on the simulated device, with the rules of the contract held against every plan and progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from pegboard.contracts.cache import CacheManager, CacheNeed
from pegboard.contracts.sampler import SamplingParams, TokenLogprobs
from pegboard.contracts.scheduler import (
    FinishReason,
    Progress,
    RowPlan,
    Scheduler,
    SchedulerNeed,
    SequenceSpec,
    StepPlan,
)

from .clock import FakeClock
from .conformance import check
from .simulated import SimulatedDevice, reference

VOCABULARY = 32
STEM = tuple(range(1, 31))

MakeScheduler = Callable[..., Scheduler]


class Story(msgspec.Struct):
    """What was heard of one sequence."""

    spec: SequenceSpec
    tokens: list[int] = []
    prompt_logprobs: list[TokenLogprobs] = []
    end: Progress | None = None
    #: -1: none yet.
    slot: int = -1
    epoch: int = -1
    paused: bool = False
    #: It was paused at some time, and may have given its slot away.
    lent: bool = False


class SchedulerUse:
    """Drives a scheduler as an engine of depth `limits.depth` does. `broken` lists what was against a rule of the
    contract as (rule, what happened); the device raises AssertionError where a plan would give wrong tokens."""

    def __init__(
        self, scheduler: Scheduler, cache: CacheManager, need: CacheNeed, limits: SchedulerNeed, clock: FakeClock
    ) -> None:
        self.scheduler, self.cache, self.limits, self.clock = scheduler, cache, limits, clock
        self.device = SimulatedDevice(need, cache.pages, vocab=VOCABULARY, random=Random(0))
        self.stories: dict[str, Story] = {}
        self.broken: list[tuple[str, str]] = []
        self.drafts = limits.decode_width - 1
        #: Rows of the last plan.
        self.planned: tuple[RowPlan, ...] = ()
        self._last_step = 0
        #: Steps in flight: sequence -> rows in them that choose a token.
        self._flying: list[dict[str, int]] = []
        #: Live, and in a step that was lost: they must have started over.
        self.void: set[str] = set()

    # -- asking ------------------------------------------------------------------------------------------------------

    def spec(self, **fields: Any) -> SequenceSpec:
        """A sequence with a name of its own. `output` tokens beyond the prompt, 20 unless said otherwise."""
        prompt = tuple(fields.pop("prompt", STEM))
        given = {
            "id": f"r{len(self.stories)}",
            "prompt": prompt,
            "sampling": SamplingParams(),
            "seed": 0,
            "max_length": len(prompt) + fields.pop("output", 20),
            "arrival": self.clock(),
            "max_drafts": self.drafts,
        }
        return SequenceSpec(**(given | fields))

    def add(self, *specs: SequenceSpec) -> None:
        """Admit all or none; what is raised passes."""
        self.scheduler.add(specs)
        for spec in specs:
            self.stories[spec.id] = Story(spec)

    def ask(self, **fields: Any) -> SequenceSpec:
        """One sequence, added."""
        spec = self.spec(**fields)
        self.add(spec)
        return spec

    def pause(self, id: str) -> bool:
        self.stories[id].paused = self.stories[id].lent = True
        return self.scheduler.pause(id)

    def resume(self, id: str) -> bool:
        self.stories[id].paused = False
        return self.scheduler.resume(id)

    def fork(self, parent: str, child: SequenceSpec, tokens: Sequence[int] = ()) -> None:
        """What is raised passes. The child goes on where its parent is."""
        self.scheduler.fork(parent, child, tokens)
        self.stories[child.id] = Story(child, tokens=list(self.stories[parent].tokens))

    @property
    def live(self) -> list[str]:
        return [name for name, story in self.stories.items() if story.end is None]

    # -- steps -------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.planned = () if plan is None else plan.rows
        if plan is not None:
            self._judge(plan)
        return plan

    def launch(self, plan: StepPlan) -> None:
        self.device.launch(plan)
        self._flying.append({row.id: row.samples for row in plan.rows})

    def step(self) -> bool:
        """Plan, launch, retire, commit. False: nothing could run and nothing flew."""
        plan = self.plan()
        if plan is not None:
            self.launch(plan)
        result = self.device.retire(self.limits.depth if plan is not None else 0)
        if result is not None:
            self._flying.pop(0)
        self.take(self.scheduler.commit(result))
        return plan is not None or result is not None

    def drain(self) -> None:
        """Retire what flies, and plan nothing meanwhile."""
        while (result := self.device.retire(0)) is not None:
            self._flying.pop(0)
            self.take(self.scheduler.commit(result))

    def lose(self) -> tuple[set[str], str]:
        """The oldest step in flight raises instead of retiring: the sequences in it that are live, and the reason."""
        error = "the device is gone"
        rows = set(self._flying.pop(0))
        self.scheduler.fail(self.device.lose(), error)
        return {name for name in rows if self.stories[name].end is None}, error

    def take(self, progresses: Sequence[Progress]) -> None:
        for progress in progresses:
            story = self.stories[progress.id]
            if story.end is not None:
                self.broken.append(("ends", f"{progress.id!r} goes on after its end with {progress}"))
            story.tokens.extend(progress.tokens)
            story.prompt_logprobs.extend(progress.prompt_logprobs)
            if progress.finish_reason is not None:
                story.end = progress

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left. AssertionError: it takes more than `limit` steps."""
        for name in self.live:
            if self.stories[name].paused:
                self.resume(name)
        for _ in range(limit):
            if not self.scheduler.has_work() and not self.device.flying:
                return
            self.step()
            self.scheduler.check_integrity()
        check(False, f"still at work after {limit} steps: {self.scheduler.stats()}, live {self.live}")

    def finish(self) -> None:
        """Run to the end, and hold everything against the rules."""
        self.run()
        self.hold()
        self.hold_outputs()
        self.hold_pages()

    # -- rules -------------------------------------------------------------------------------------------------------

    def hold(self, *rules: str) -> None:
        """Raise what was against one of these rules (of all, without any)."""
        found = [f"{rule}: {what}" for rule, what in self.broken if not rules or rule in rules]
        check(not found, "\n".join(found[:5]))

    def hold_outputs(self) -> None:
        """Every sequence has ended, with the tokens that it gets alone, or the first of them."""
        for name, story in self.stories.items():
            check(story.end is not None, f"{name!r} has not ended")
            output, reason = reference(story.spec, VOCABULARY)
            got, end = tuple(story.tokens), self.reason(name)
            if end in ("stop", "length"):
                check((got, end) == (output, reason), f"{name!r}: {got}, {end}; alone it gives {output}, {reason}")
            else:
                check(got == output[: len(got)], f"{name!r}: {got}; alone it begins {output[: len(got)]}")

    def hold_pages(self) -> None:
        """Nothing is held, waits or runs."""
        self.scheduler.check_integrity()
        stats = self.cache.stats()
        check(stats.free + stats.cached == stats.total, f"pages are lost: {stats}")
        told = self.scheduler.stats()
        counts = (told.waiting, told.running, told.preempted, told.paused)
        check(counts == (0, 0, 0, 0), f"nothing is live, but there is somebody: {told}")

    def reason(self, name: str) -> FinishReason | None:
        end = self.stories[name].end
        return None if end is None else end.finish_reason

    def _judge(self, plan: StepPlan) -> None:
        limits, rows = self.limits, plan.rows

        def rule(name: str, right: bool, what: str) -> None:
            if not right:
                self.broken.append((name, f"step {plan.id}: {what}"))

        tokens = sum(row.query for row in rows)
        rule("limits", 0 < len(rows) <= limits.max_rows, f"{len(rows)} rows, the limit is {limits.max_rows}")
        rule("limits", tokens <= limits.max_step_tokens, f"{tokens} tokens, the limit is {limits.max_step_tokens}")
        rule("limits", plan.id > self._last_step, f"comes after step {self._last_step}")
        rule("limits", self.device.flying <= limits.depth, f"{self.device.flying} fly already")
        narrow = [row.query <= limits.decode_width for row in rows]
        rule(
            "order", narrow == sorted(narrow, reverse=True), f"queries {[r.query for r in rows]}: decode rows go first"
        )
        self._last_step = max(self._last_step, plan.id)
        for row in rows:
            story = self.stories[row.id]
            rule("ends", story.end is None, f"{row.id!r} has ended")
            rule("paused", not story.paused, f"{row.id!r} is paused")
            longest = story.spec.max_length
            rule("length", row.start + row.query <= longest, f"{row.id!r} runs to {row.start + row.query} of {longest}")
            most = min(story.spec.max_drafts, limits.decode_width - 1)
            rule("drafts", row.drafts <= most, f"{row.id!r} has {row.drafts} drafts, at most {most} are wanted")
            rule("drafts", not row.drafts or row.query == 1 + row.drafts, f"{row.id!r} drafts beside a prompt")
            if row.opening is not None:  # from all its tokens: what flies of it is void
                for flight in self._flying:
                    flight.pop(row.id, None)
            rule("lost", row.opening is not None or row.id not in self.void, f"{row.id!r} goes on from a lost step")
            self.void.discard(row.id)
            waits = story.spec.needs_host_token and any(flight.get(row.id) for flight in self._flying)
            rule("host", not waits, f"{row.id!r} runs before the host knows its last token")
            self._judge_slot(row, story, rule)

    def _judge_slot(self, row: RowPlan, story: Story, rule: Callable[[str, bool, str], None]) -> None:
        inside = 0 <= row.slot < self.limits.max_rows
        rule("slots", inside, f"{row.id!r} has slot {row.slot} of {self.limits.max_rows}")
        moved = row.slot != story.slot and story.slot >= 0
        rule("slots", not moved or story.lent, f"{row.id!r} moves from slot {story.slot} to {row.slot}")
        for name, other in self.stories.items():
            if other.slot == row.slot and other is not story and other.end is None:
                free = other.lent or not self.scheduler.is_live(name)
                rule("slots", free, f"{row.id!r} takes slot {row.slot} of {name!r}")
                other.slot = -1
        fresh = row.slot != story.slot or row.epoch != story.epoch
        rule("openings", not fresh or row.opening is not None, f"{row.id!r} begins in slot {row.slot} without opening")
        story.slot, story.epoch = row.slot, row.epoch


def make_traffic(use: SchedulerUse, seed: int, count: int = 12) -> list[SequenceSpec]:
    """Prompts with shared beginnings, children of n > 1, stops, minimal lengths, salts, priorities, host tokens."""
    random = Random(f"traffic {seed}")
    longest = use.limits.max_length
    stems = [tuple(random.randrange(VOCABULARY) for _ in range(40)) for _ in range(3)]
    specs: list[SequenceSpec] = []
    for number in range(count):
        own = tuple(random.randrange(VOCABULARY) for _ in range(random.randrange(1, 24)))
        prompt = random.choice(stems)[: random.randrange(1, 40)] + own
        spec = use.spec(
            id=f"t{seed}-{number}",
            prompt=prompt,
            sampling=SamplingParams(min_tokens=random.choice([0, 0, 5])),
            seed=number,
            max_length=random.randrange(len(prompt) + 1, longest + 1),
            stop_ids=frozenset(random.sample(range(VOCABULARY), random.choice([0, 1, 2]))),
            priority=random.choice([0, 0, 1]),
            arrival=float(number),
            salt=random.choice(["", "tenant"]),
            needs_host_token=random.random() < 0.15,
            max_drafts=random.choice([use.drafts, use.drafts, 0]),
        )
        specs.append(spec)
        for child in range(random.choice([0, 0, 0, 2])):
            specs.append(msgspec.structs.replace(spec, id=f"{spec.id}-{child}", parent=spec.id, seed=1000 + child))
    return specs
