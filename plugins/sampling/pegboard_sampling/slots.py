"""What the sampler keeps for each slot: numbers on the device for the arithmetic, facts on the host for the path.

Letters: C slots, V vocabulary, B pool rows (slots with penalties or a bias), M choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pegboard.contracts.sampler import SamplingParams, SlotOpening
from pegboard.errors import PegboardError

Kind = Literal["greedy", "noise", "top_k", "top_p"]

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTEGERS = ("seed", "top_k", "min_tokens", "max_length", "chosen")


@dataclass(frozen=True)
class SlotFacts:
    """The host's view of a slot's parameters: which code its rows need."""

    kind: Kind
    features: frozenset[str]
    top_k: int
    logprobs: int | None
    processed_logprobs: bool
    pool_row: int | None

    @property
    def adjusted(self) -> bool:
        """Whether its logits are changed before the choice."""
        return bool(self.features & {"penalties", "bias", "min_tokens"})


def kind_of(sampling: SamplingParams) -> Kind:
    if sampling.temperature == 0 or sampling.top_k == 1 or sampling.top_p == 0:
        return "greedy"
    if sampling.top_k > 0:
        return "top_k"
    return "top_p" if sampling.top_p < 1 else "noise"


def features_of(sampling: SamplingParams) -> frozenset[str]:
    found = set()
    if kind_of(sampling) != "greedy":
        found.add("noise")
        found.update(
            name
            for name, used in (
                ("top_k", sampling.top_k > 0),
                ("top_p", sampling.top_p < 1),
                ("min_p", sampling.min_p > 0),
            )
            if used
        )
    if sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        found.add("penalties")
    if sampling.logit_bias:
        found.add("bias")
    if sampling.min_tokens > 0:
        found.add("min_tokens")
    if sampling.logprobs is not None:
        found.add("logprobs")
    return frozenset(found)


class SlotTable:
    """State of all slots. `open` builds it, `advance` counts chosen tokens, `adjust` applies it to logits."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._vocab_size = vocab_size
        self._facts: list[SlotFacts | None] = [None] * slots
        self._floats = torch.zeros(slots, len(_FLOATS), dtype=torch.float64, device=device)
        self._integers = torch.zeros(slots, len(_INTEGERS), dtype=torch.int64, device=device)
        #: [C, W] int64, -1 beyond a slot's own; W grows with the longest list
        self._stop_ids = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        #: [C] int64 into the pool; slots without a row point at row 0, which nobody owns
        self._pool_row = torch.zeros(slots, dtype=torch.int64, device=device)
        self._free_rows: list[int] = []
        #: [B, V]: occurrences in the output, presence in the prompt, bias
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
        self._bias = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)

    def facts(self, slot: int) -> SlotFacts:
        found = self._facts[slot] if 0 <= slot < len(self._facts) else None
        if found is None:
            raise PegboardError(f"slot {slot} was not opened; this sampler has slots 0 to {len(self._facts) - 1}")
        return found

    def number(self, name: str, slots: Tensor) -> Tensor:
        """One parameter of the slots [M]: float64 or int64 [M]."""
        if name in _FLOATS:
            return self._floats[slots, _FLOATS.index(name)]
        return self._integers[slots, _INTEGERS.index(name)]

    def open(self, openings: Sequence[SlotOpening]) -> None:
        if not openings:
            return
        for opening in openings:
            if not 0 <= opening.slot < len(self._facts):
                raise PegboardError(f"slot {opening.slot} does not exist; slots are 0 to {len(self._facts) - 1}")
            ids = (*opening.prompt, *opening.output, *opening.stop_ids, *opening.sampling.logit_bias)
            if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                wrong = next(id for id in ids if not 0 <= id < self._vocab_size)
                raise PegboardError(f"slot {opening.slot}: token id {wrong} is not in 0 .. {self._vocab_size - 1}")
        width = max(len(opening.stop_ids) for opening in openings)
        if width > self._stop_ids.shape[1]:
            more = self._stop_ids.new_full((len(self._facts), width - self._stop_ids.shape[1]), -1)
            self._stop_ids = torch.cat([self._stop_ids, more], dim=1)
        width = self._stop_ids.shape[1]
        floats, integers, stops, rows = [], [], [], []
        for opening in openings:
            sampling = opening.sampling
            rows.append(self._open_one(opening))
            floats.append(
                [
                    sampling.temperature,
                    sampling.top_p,
                    sampling.min_p,
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                ]
            )
            seed = (opening.seed + (1 << 63)) % (1 << 64) - (1 << 63)
            top_k = min(sampling.top_k, self._vocab_size)
            integers.append([seed, top_k, sampling.min_tokens, opening.max_length, len(opening.output)])
            stops.append([*opening.stop_ids, *[-1] * (width - len(opening.stop_ids))])
        slots = self.tensor([opening.slot for opening in openings])
        self._floats.index_copy_(0, slots, self.tensor(floats, torch.float64))
        self._integers.index_copy_(0, slots, self.tensor(integers))
        self._stop_ids.index_copy_(0, slots, self.tensor(stops))
        self._pool_row.index_copy_(0, slots, self.tensor(rows))

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Host values on the device, without waiting for it."""
        host = torch.tensor(values, dtype=dtype)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def advance(self, slots: Tensor, ids: Tensor, host_slots: Sequence[int]) -> None:
        """Count ids [N, m] (negative: nothing) as output of distinct slots [N]."""
        kept = ids >= 0
        self._integers[:, _INTEGERS.index("chosen")].index_add_(0, slots, kept.sum(1))
        if any("penalties" in self.facts(slot).features for slot in host_slots):
            # Slots without a pool row count into row 0, which is never read
            rows = self._pool_row[slots][:, None].expand_as(ids)
            safe = ids.clamp(min=0)
            self._counts.index_put_((rows, safe), kept.int(), accumulate=True)

    def is_end(self, slots: Tensor, ids: Tensor) -> Tensor:
        """ids [N, m] chosen one after another by slots [N]: whether each is one of the slot's stop ids. [N, m]"""
        return (ids[..., None] == self._stop_ids[slots][:, None]).any(-1) & (ids >= 0)

    def adjust(self, logits: Tensor, slots: Tensor, features: frozenset[str], path: Tensor | None) -> Tensor:
        """logits [M, V] after penalties and bias, without ids that may not end the text yet; a new tensor in float32
        (float64 stays). `path` [M, j] holds tokens chosen by the slot before this choice and not yet counted,
        -1 for none."""
        out = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        pool = self._pool_row[slots]
        if "penalties" in features:
            self._penalise(out, slots, pool, path)
        if "bias" in features:
            out += self._bias[pool]
        if "min_tokens" in features:
            self._delay_end(out, slots, path)
        return out

    def _penalise(self, out: Tensor, slots: Tensor, pool: Tensor, path: Tensor | None) -> None:
        counts = self._counts[pool]
        if path is not None:
            counts.scatter_add_(1, path.clamp(min=0), (path >= 0).int())
        seen = self._in_prompt[pool] | (counts > 0)
        repetition, presence, frequency = (
            self.number(name, slots)[:, None].to(out.dtype) for name in ("repetition", "presence", "frequency")
        )
        # An untouched logit stays as it is, infinite or not
        penalised = torch.where(out > 0, out / repetition, out * repetition)
        torch.where(seen, penalised, out, out=out)
        penalised = out - presence - frequency * counts
        torch.where(counts > 0, penalised, out, out=out)

    def _delay_end(self, out: Tensor, slots: Tensor, path: Tensor | None) -> None:
        chosen = self.number("chosen", slots)
        if path is not None:
            chosen = chosen + (path >= 0).sum(1)
        early = (chosen < self.number("min_tokens", slots))[:, None]
        stops = self._stop_ids[slots]
        # Where nothing is masked, write the logit that stands there
        place = stops.clamp(min=0)
        hit = torch.zeros_like(out, dtype=torch.int32).scatter_add_(1, place, (early & (stops >= 0)).int())
        out.masked_fill_(hit > 0, -torch.inf)

    def _open_one(self, opening: SlotOpening) -> int:
        """The host's facts, and the pool row (0: none), filled."""
        sampling, before = opening.sampling, self._facts[opening.slot]
        row = before.pool_row if before is not None else None
        features = features_of(sampling)
        if not features & {"penalties", "bias"}:
            if row is not None:
                self._free_rows.append(row)
            row = None
        elif row is None:
            row = self._take_row()
        self._facts[opening.slot] = SlotFacts(
            kind=kind_of(sampling),
            features=features,
            top_k=min(sampling.top_k, self._vocab_size),
            logprobs=sampling.logprobs,
            processed_logprobs=sampling.logprobs_mode == "processed",
            pool_row=row,
        )
        if row is None:
            return 0
        for tensor in (self._counts, self._in_prompt, self._bias):
            tensor[row].zero_()
        if "penalties" in features:
            output = self.tensor(opening.output)
            self._counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            self._in_prompt[row].index_fill_(0, self.tensor(opening.prompt), True)
        if "bias" in features:
            ids = self.tensor(list(sampling.logit_bias))
            self._bias[row].index_copy_(0, ids, self.tensor(list(sampling.logit_bias.values()), torch.float32))
        return row

    def _take_row(self) -> int:
        if not self._free_rows:
            size = self._counts.shape[0]
            grown = min(2 * size, len(self._facts) + 1)
            self._counts, self._in_prompt, self._bias = (
                torch.cat([tensor, tensor.new_zeros(grown - size, self._vocab_size)])
                for tensor in (self._counts, self._in_prompt, self._bias)
            )
            self._free_rows.extend(range(grown - 1, size - 1, -1))
        return self._free_rows.pop()
