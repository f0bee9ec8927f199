"""Several samples of one prompt, of which the most probable are delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from .contracts.sampler import SamplingParams, TokenLogprobs
from .request import Delta
from .streams import Handle

if TYPE_CHECKING:
    from .engine import Engine


class BestOf(Handle):
    """Holds every delta back until the last sample has ended. Then come those of the `n` samples with the greatest sum
    of log-probabilities (of those that ended well, if there are so many), as continuations 0, 1, ..., best first."""

    def __init__(
        self,
        sampling: SamplingParams,
        engine: Engine,
        id: str,
        prompt: tuple[int, ...],
        indices: dict[str, int],
        bound: int,
    ) -> None:
        super().__init__(engine, id, prompt, indices, bound)
        self._sampling = sampling
        self._open = set(range(sampling.n))
        self._running = set(indices.values())
        self._scored: tuple[TokenLogprobs, ...] = ()
        self._samples: dict[int, list[Delta]] = {index: [] for index in indices.values()}

    def put(self, delta: Delta) -> bool:
        self._scored += delta.prompt_logprobs
        self._samples[delta.index].append(replace(delta, prompt_logprobs=()))
        if delta.finish_reason is not None:
            self._running.discard(delta.index)
        if not self._running:
            if self._scored:
                super().put(Delta(prompt_logprobs=self._scored))
            for index, own in enumerate(sorted(self._samples.values(), key=_rank)[: self._sampling.n]):
                for held in own:
                    super().put(self._delivered(held, index, _score(own)))
        return True  # whoever consumes has got nothing yet

    def _delivered(self, delta: Delta, index: int, score: float) -> Delta:
        return replace(
            delta,
            index=index,
            logprobs=delta.logprobs if self._sampling.logprobs is not None else (),
            score=None if delta.finish_reason is None else score,
        )


def _score(deltas: list[Delta]) -> float:
    return sum(record.logprob for delta in deltas for record in delta.logprobs)


def _rank(deltas: list[Delta]) -> tuple[bool, float]:
    return deltas[-1].finish_reason not in ("stop", "length"), -_score(deltas)
