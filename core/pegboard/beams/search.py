"""Beam search over one prompt, as arithmetic on the host: log-probabilities in, the next beams or the best texts out.

The order of decisions, and their rounding to float32, are those of transformers' `GenerationMixin._beam_search` (its
version 5), so that the texts are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Literal

import msgspec
import numpy

from pegboard.contracts.sampler import SamplingParams, TokenLogprobs

EarlyStopping = bool | Literal["never"]


def count_candidates(num_beams: int, stop_ids: Set[int]) -> int:
    """Continuations that a step looks at: enough that `num_beams` go on, whatever ends."""
    return max(2, 1 + len(stop_ids)) * num_beams


def count_listed(sampling: SamplingParams, stop_ids: Set[int]) -> int:
    """Log-probabilities that each row must list: the candidates, and the stop ids that may not be chosen yet."""
    early = len(stop_ids) if sampling.min_tokens else 0
    return max(count_candidates(sampling.num_beams, stop_ids) + early, sampling.logprobs or 0)


class Node(msgspec.Struct, frozen=True):
    """The last token of a text, and what stands before it."""

    before: Node | None
    #: With the log-probabilities that it was chosen from.
    record: TokenLogprobs

    def path(self) -> tuple[TokenLogprobs, ...]:
        """From the first token to this one."""
        return tuple(reversed(list(self._back())))

    def _back(self) -> Iterator[TokenLogprobs]:
        node: Node | None = self
        while node is not None:
            yield node.record
            node = node.before


class Text(msgspec.Struct, frozen=True):
    """A finished one."""

    score: float
    last: Node
    #: Ended by a stop id, else by its length.
    stopped: bool


class Step(msgspec.Struct, frozen=True):
    """The next beams, best first: (place of the beam that it goes on from, its token)."""

    beams: tuple[tuple[int, int], ...]


class _Candidate(msgspec.Struct, frozen=True):
    total: numpy.float32
    beam: int
    token: int
    logprob: float


class BeamSearch:
    """`texts` are the finished ones, best first, at most `num_beams`."""

    def __init__(self, sampling: SamplingParams, stop_ids: Set[int], max_tokens: int) -> None:
        self._beams = sampling.num_beams
        self._penalty = sampling.length_penalty
        self._early: EarlyStopping = sampling.early_stopping
        self._min_tokens = sampling.min_tokens
        self._listed = sampling.logprobs or 0
        self._stop_ids, self._max_tokens = stop_ids, max_tokens
        self._candidates = count_candidates(self._beams, stop_ids)
        #: Tokens of each beam.
        self._length = 0
        #: Of the beams that run, in their order: sum of log-probabilities, last token (None: none yet).
        self._running: list[tuple[numpy.float32, Node | None]] = [(numpy.float32(0), None)]
        self.texts: list[Text] = []

    def advance(self, rows: Sequence[TokenLogprobs]) -> Step | None:
        """`rows`: of each running beam the most probable next tokens, `count_listed` of them. None: it is over."""
        self._length += 1
        candidates = self._best(rows)
        last = self._length >= self._max_tokens
        step: list[tuple[int, int]] = []
        running: list[tuple[numpy.float32, Node | None]] = []
        for place, found in enumerate(candidates):
            stops = found.token in self._stop_ids
            if not (stops or last):
                if len(running) < self._beams:
                    running.append((found.total, self._node(found, rows)))
                    step.append((found.beam, found.token))
            elif place < self._beams:
                self.texts.append(Text(self._score(found.total, self._length), self._node(found, rows), stops))
        self.texts = sorted(self.texts, key=lambda text: -text.score)[: self._beams]
        self._running = running
        return Step(tuple(step)) if running and self._goes_on() else None

    def _best(self, rows: Sequence[TokenLogprobs]) -> list[_Candidate]:
        """Of all beams' continuations, best first; equals in the order of beams and tokens."""
        barred = self._stop_ids if self._length <= self._min_tokens else frozenset()
        found = [
            _Candidate(total + numpy.float32(logprob), beam, token, logprob)
            for beam, ((total, _), row) in enumerate(zip(self._running, rows, strict=True))
            for token, logprob in row.top
            if token not in barred and logprob > -numpy.inf
        ]
        return sorted(found, key=lambda c: (-c.total, c.beam, c.token))[: self._candidates]

    def _node(self, found: _Candidate, rows: Sequence[TokenLogprobs]) -> Node:
        record = TokenLogprobs(found.token, found.logprob, rows[found.beam].top[: self._listed])
        return Node(self._running[found.beam][1], record)

    def _score(self, total: numpy.float32, length: int) -> float:
        return float(total / numpy.float32(length**self._penalty))

    def _goes_on(self) -> bool:
        if len(self.texts) < self._beams:
            return True
        reach = self._max_tokens if self._early == "never" and self._penalty > 0 else self._length
        return self._early is not True and self._score(self._running[0][0], reach) > self.texts[-1].score
