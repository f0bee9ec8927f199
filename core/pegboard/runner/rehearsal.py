"""The steps that most requests lead to, run once before there are any, so that their kernels compile side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from pegboard.contracts.batch import Bounds
from pegboard.contracts.sampler import Sampler, SamplingParams, SlotOpening

from .step_shape import Limits, StepShape, padded_shape
from .stepping import Computed, Stepping

#: Prompt tokens of a step, beside one of as many as there may be.
_PROMPTS = (16, 32, 64, 128, 256, 1024)
_PROMPTS_AT_ONCE = (1, 4, 16, 32)
#: Ways to choose; a step may hold rows of each.
_CHOICES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.9),
)


def shapes_ahead(limits: Limits) -> tuple[list[StepShape], list[StepShape]]:
    """Those of a first request, and the others."""
    short = min(16, limits.length)
    first = [_shape(0, 1, 16, short), _shape(1, 0, 0, short)]
    wanted = [_shape(rows, 0, 0, short) for rows in range(2, limits.rows + 1)]
    reach = short
    while reach < limits.length:
        reach = min(4 * reach, limits.length)
        wanted += [_shape(rows, 0, 0, reach) for rows in {1, limits.rows}]
    wanted += [_shape(0, 1, tokens, short) for tokens in _PROMPTS if tokens <= limits.step_tokens]
    wanted.append(_shape(0, 1, limits.step_tokens, short, samples=0))
    some = min(1024, limits.step_tokens)
    several = [count for count in _PROMPTS_AT_ONCE if count <= min(limits.rows, some)]
    wanted += [_shape(0, count, some, short) for count in several]
    wanted += [_shape(rows, several[:2][-1], some, short) for rows in (1, min(16, limits.rows), limits.rows)]
    padded = [dict.fromkeys(filter(None, (padded_shape(one, limits) for one in some))) for some in (first, wanted)]
    return list(padded[0]), [shape for shape in padded[1] if shape not in padded[0]]


def _shape(decode: int, prompts: int, tokens: int, reach: int, samples: int | None = None) -> StepShape:
    """Of rows that go on, and of `prompts` rows with `tokens` in all."""
    return StepShape(
        decode=_bounds(decode, decode, 1, reach) if decode else None,
        prefill=_bounds(prompts, tokens, tokens, max(reach, tokens)) if prompts else None,
        known="some" if prompts else "none",
        samples=decode + prompts if samples is None else samples,
        chain=not prompts,
    )


def _bounds(rows: int, tokens: int, query: int, reach: int) -> Bounds:
    return Bounds(rows=rows, tokens=tokens, max_query=query, min_query=1, max_kv=reach)


class Rehearsal:
    """Runs steps of idle rows. `done`: what may be recorded after that, as `Recordings` names it."""

    def __init__(self, stepping: Stepping, sampler: Sampler, limits: Limits) -> None:
        self._stepping, self._sampler, self._idle = stepping, sampler, limits.rows
        self._choices = list(_choices(sampler, limits)) if sampler.capturable else []
        self.done: set[Hashable] = set()

    def run(
        self, shapes: Sequence[StepShape], vector_of: Callable[[StepShape], Tensor], *, every_choice: bool = True
    ) -> None:
        """`vector_of`: what a step of such a shape is told. `every_choice`: each way to choose is tried at each number
        of choices, not the greedy one alone."""
        #: Of the most choices
        widest: Tensor | None = None
        for shape in shapes:
            computed = self._stepping.compute(shape, vector_of(shape))
            self.done.add(shape)
            if computed.logits is not None and self._choices:
                self._choose(computed, self._choices[0])
                widest = computed.logits if widest is None or len(widest) < len(computed.logits) else widest
        if widest is not None and every_choice:
            for count in sorted({shape.samples for shape in shapes} - {0}):
                idle = torch.full((count,), self._idle, device=widest.device)
                computed = Computed(None, widest[:count], idle, torch.zeros_like(idle), None)
                for slots in self._choices[1:]:
                    if len(slots) <= count:
                        self._choose(computed, slots)

    def _choose(self, computed: Computed, slots: tuple[int, ...]) -> None:
        key = self._sampler.graph_key(slots)
        self._stepping.tell(self._stepping.choose(computed, slots, key))
        self.done.add(choice_key(len(computed.slots), key))


def choice_key(samples: int, key: Hashable) -> Hashable:
    """The sampler's part of a recording's key."""
    return "choice", samples, key


def verification_key(shape: StepShape, key: Hashable) -> Hashable:
    """Where it verifies drafts."""
    return "verification", shape.verified, shape.drafts, key


def _choices(sampler: Sampler, limits: Limits) -> Iterator[tuple[int, ...]]:
    """Opens slots of the sampler, which those who get them open anew; the slots of each step worth a rehearsal, one for
    each graph key, the greedy one first."""
    slots = range(min(len(_CHOICES), limits.rows))
    sampler.open(
        [
            SlotOpening(slot=slot, sampling=_CHOICES[slot], seed=0, prompt=(0,), max_length=limits.length)
            for slot in slots
        ]
    )
    together = [chosen for count in range(1, len(slots) + 1) for chosen in combinations(slots, count)]
    yield from reversed({sampler.graph_key(chosen): chosen for chosen in reversed(together)}.values())
