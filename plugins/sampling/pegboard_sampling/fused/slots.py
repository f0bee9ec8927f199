"""What the fused sampler keeps for each slot: numbers on the device, at addresses that stay, and facts on the host.

Letters: C slots, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pegboard.contracts.sampler import SamplingParams, SlotOpening
from pegboard.errors import PegboardError

from ..slots import features_of, kind_of
from . import values as v
from .best import MOST

#: Stop ids that stand in a table of their own; those of a slot with more are looked up among its words.
STOPS = 8


class Path(NamedTuple):
    """Which kernels some slots need, and what they must be able to do: the sampler's part of a graph's key."""

    noise: bool = False
    few: bool = False
    wide: bool = False
    #: Of the wide ones, those that count tokens.
    ranked: bool = False
    words: bool = False
    biases: bool = False
    #: The most log-probabilities that a slot asks for; None: no slot does.
    logprobs: int | None = None
    raw: bool = False
    processed: bool = False

    def joined(self, other: Path) -> Path:
        asked = [count for count in (self.logprobs, other.logprobs) if count is not None]
        return Path(
            noise=self.noise or other.noise,
            few=self.few or other.few,
            wide=self.wide or other.wide,
            ranked=self.ranked or other.ranked,
            words=self.words or other.words,
            biases=self.biases or other.biases,
            logprobs=max(asked) if asked else None,
            raw=self.raw or other.raw,
            processed=self.processed or other.processed,
        )


class FusedSlots:
    """`floats` [C, FLOATS] float64, `integers` [C, INTEGERS] int64 and `stops` [C, STOPS] int64, -1 for none. A slot
    that was never opened is greedy.

    `words` [C, V] int32 says of each token whether it stands in the prompt, ends the text, and how often it was chosen;
    `biases` [C, V] float32. Both are made when a slot first needs them, then for all slots, so that they never move."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, *, drafted: bool = False) -> None:
        """`drafted`: rows may have drafts, so the device must know what ends a text."""
        self.device = device
        self._drafted = drafted
        self._vocab_size = vocab_size
        self._features: list[frozenset[str]] = [frozenset()] * slots
        #: By slot; equal ones are one object, so that those of a step are told apart without comparing them.
        self._paths = [Path()] * slots
        self._known: dict[Path, Path] = {path: path for path in self._paths}
        self.floats = torch.zeros(slots, v.FLOATS.value, dtype=torch.float64, device=device)
        self.integers = torch.zeros(slots, v.INTEGERS.value, dtype=torch.int64, device=device)
        self.integers[:, v.LOGPROBS.value] = -1
        self.stops = torch.full((slots, STOPS), -1, dtype=torch.int64, device=device)
        self.words: Tensor | None = None
        self.biases: Tensor | None = None

    def features(self, host_slots: Iterable[int]) -> frozenset[str]:
        return frozenset().union(*(self._features[slot] for slot in host_slots))

    def path(self, host_slots: Iterable[int]) -> Path:
        paths = self._paths
        found = {id(path): path for path in [paths[slot] for slot in host_slots]}
        path = Path()
        for one in found.values():
            path = path.joined(one)
        return path

    def open(self, openings: Sequence[SlotOpening]) -> None:
        if not openings:
            return
        for opening in openings:
            self._check(opening)
        rows = [self._numbers(opening) for opening in openings]
        slots = self._upload([opening.slot for opening in openings])
        self.floats.index_copy_(0, slots, self._upload([row[0] for row in rows], torch.float64))
        self.integers.index_copy_(0, slots, self._upload([row[1] for row in rows]))
        if self._drafted:
            self.stops.index_copy_(0, slots, self._upload([_few_stops(opening.stop_ids) for opening in openings]))
        for opening in openings:
            self._fill(opening)

    def _check(self, opening: SlotOpening) -> None:
        if not 0 <= opening.slot < len(self._paths):
            raise PegboardError(f"slot {opening.slot} does not exist; slots are 0 to {len(self._paths) - 1}")
        ids = (*opening.prompt, *opening.output, *opening.stop_ids, *opening.sampling.logit_bias)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(id for id in ids if not 0 <= id < self._vocab_size)
            raise PegboardError(f"slot {opening.slot}: token id {wrong} is not in 0 .. {self._vocab_size - 1}")

    def _numbers(self, opening: SlotOpening) -> tuple[list[float], list[int]]:
        """The slot's floats and integers; the host's facts follow."""
        sampling, slot = opening.sampling, opening.slot
        features = features_of(sampling)
        kind = _kind(sampling, self._vocab_size)
        processed = sampling.logprobs is not None and sampling.logprobs_mode == "processed"
        many_stops = self._drafted and len(set(opening.stop_ids)) > STOPS
        self._features[slot] = features
        path = Path(
            noise=kind.value == v.NOISE.value,
            few=kind.value == v.FEW.value,
            wide=kind.value == v.WIDE.value,
            ranked=kind.value == v.WIDE.value and sampling.top_k > 0,
            words="penalties" in features or _delays(opening) or many_stops,
            biases="bias" in features,
            logprobs=None if sampling.logprobs is None else min(sampling.logprobs, self._vocab_size),
            raw=sampling.logprobs is not None and not processed,
            processed=processed,
        )
        self._paths[slot] = self._known.setdefault(path, path)
        flags = (
            (v.PENALTIES.value if "penalties" in features else 0)
            | (v.BIAS.value if "bias" in features else 0)
            | (v.PROCESSED.value if processed else 0)
            | (v.MANY_STOPS.value if many_stops else 0)
        )
        floats = [
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        ]
        integers = [
            (opening.seed + (1 << 63)) % (1 << 64) - (1 << 63),
            kind.value,
            min(sampling.top_k, self._vocab_size),
            flags,
            sampling.min_tokens if _delays(opening) else 0,
            len(opening.output),
            -1 if sampling.logprobs is None else sampling.logprobs,
            opening.max_length,
        ]
        return floats, integers

    def _fill(self, opening: SlotOpening) -> None:
        """The slot's words and biases. Those of slots that have none are never read."""
        path, slot = self._paths[opening.slot], opening.slot
        if path.words:
            if self.words is None:
                self.words = self._table(torch.int32)
            words: Counter[int] = Counter()
            for id in opening.output:
                words[id] += v.CHOSEN_ONCE.value
            for ids, bit in ((opening.prompt, v.IN_PROMPT.value), (opening.stop_ids, v.STOP.value)):
                for id in set(ids):
                    words[id] |= bit
            self._put(self.words[slot], words)
        if path.biases:
            if self.biases is None:
                self.biases = self._table(torch.float32)
            self._put(self.biases[slot], opening.sampling.logit_bias)

    def _put(self, row: Tensor, numbers: Any) -> None:
        row.zero_()
        row.index_copy_(0, self._upload(list(numbers)), self._upload(list(numbers.values()), row.dtype))

    @torch.inference_mode(False)
    def _table(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self._paths), self._vocab_size, dtype=dtype, device=self.device)

    def _upload(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Host numbers on the device, without waiting for it."""
        host = torch.tensor(numbers, dtype=dtype)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def _few_stops(stop_ids: Sequence[int]) -> list[int]:
    stops = list(dict.fromkeys(stop_ids))[:STOPS]
    return stops + [-1] * (STOPS - len(stops))


def _delays(opening: SlotOpening) -> bool:
    """Whether stop ids are masked for some tokens yet."""
    return len(opening.output) < opening.sampling.min_tokens and bool(opening.stop_ids)


def _kind(sampling: SamplingParams, vocab_size: int) -> Any:
    """One of the kinds in `values`."""
    kind = kind_of(sampling)
    if kind == "greedy":
        return v.GREEDY
    if kind == "top_k" and min(sampling.top_k, vocab_size) <= MOST.value:
        return v.FEW
    return v.NOISE if kind == "noise" and sampling.min_p == 0 else v.WIDE
