"""Samplers: from logits to token ids, with per-request state in slots.

The choice for a row is argmax(processed logits + Gumbel noise); greedy is argmax, first of equals. Noise is
Philox4x32-10 with key = the request's seed and counter = (token id, absolute position of the chosen token), so a
token never depends on the place in the batch. `pegboard.noise` is the reference.

Letters: N rows that choose a token, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from .device import DeviceFacts

if TYPE_CHECKING:
    from torch import Tensor


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen. Order: processors, penalties, bias, temperature, top-k, top-p, min-p.

    Validated at submission (`pegboard.request.check_sampling`), not here.
    """

    #: New tokens at most; None: as many as the context and the cache admit.
    max_tokens: int | None = None
    #: EOS, stop ids and stop strings do not end the text before this many tokens.
    min_tokens: int = 0
    #: 0 is greedy.
    temperature: float = 1.0
    #: Keep exactly k tokens, ties by lower id; 0: off; 1: greedy.
    top_k: int = 0
    #: Keep the smallest set whose mass reaches p, after top_k and renormalised; 1: off; 0: greedy.
    top_p: float = 1.0
    #: Drop tokens less probable than min_p times the most probable one.
    min_p: float = 0.0
    #: Divides positive and multiplies negative logits of tokens seen in prompt or output; 1: off.
    repetition_penalty: float = 1.0
    #: Subtracted once from tokens seen in the output.
    presence_penalty: float = 0.0
    #: Subtracted once an occurrence in the output.
    frequency_penalty: float = 0.0
    #: Token id -> added to its logit.
    logit_bias: Mapping[int, float] = {}
    #: Logits processors of the config that this request wants -> their arguments.
    processors: Mapping[str, Mapping[str, Any]] = {}
    #: Fixes the tokens, whatever runs beside; None: random.
    seed: int | None = None
    #: Continuations of the prompt: independent ones, or the best of `best_of` or of `num_beams`.
    n: int = 1
    #: Samples made; the `n` with the greatest sum of log-probabilities are given. None: n.
    best_of: int | None = None
    #: Above 1: beam search of so many beams; nothing is drawn.
    num_beams: int = 1
    #: Beam search: a text's score is the sum of its log-probabilities / length ** length_penalty.
    length_penalty: float = 1.0
    #: Beam search. True: ends with `num_beams` texts; False: when none that runs is likely to become better; "never":
    #: when none can become better.
    early_stopping: bool | Literal["never"] = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Show the stop string in the text.
    include_stop: bool = False
    ignore_eos: bool = False
    #: Log-probabilities of the chosen token and of this many most probable ones; None: off; 0: the chosen one only.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    #: raw: log_softmax of the model's logits; processed: of what the choice was made from.
    logprobs_mode: Literal["raw", "processed"] = "raw"


class SlotOpening(msgspec.Struct, frozen=True, kw_only=True):
    """All that per-slot state is built from. Sent with the first rows of a request, and again after preemption."""

    slot: int
    sampling: SamplingParams
    #: 64-bit key of the noise; resolved, so that a preempted or migrated request goes on alike.
    seed: int
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    #: Ids that end the text (EOS unless ignored, stop ids): masked until min_tokens were chosen.
    stop_ids: tuple[int, ...] = ()
    #: Length of prompt + output that ends the request.
    max_length: int


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one token and of the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplerNeed(msgspec.Struct, frozen=True, kw_only=True):
    device: DeviceFacts
    vocab_size: int
    #: Slots are 0 .. slots-1. The runner may keep the last one for the idle rows of captured steps.
    slots: int
    max_length: int
    #: Drafts a row at most (verify), and whether they are trees.
    max_drafts: int = 0
    trees: bool = False
    batch_invariant: bool = False
    #: Of the logits; None: not known yet, any.
    dtype: str | None = None


class SampleRows(msgspec.Struct, frozen=True, kw_only=True):
    """Which slots choose. Device tensors, with what the host knows for choosing a code path (and a graph's key)."""

    #: [N] int64
    slots: Tensor
    #: [N] int64: absolute position that the chosen token will have (the counter of the noise).
    positions: Tensor
    #: The same slots on the host, without the idle ones of a captured step, which come last.
    host_slots: tuple[int, ...]
    #: `Sampler.graph_key` of the slots, all that a capturable sampler may choose its code by; None: it asks itself.
    key: Hashable = None


class LogprobTensors(msgspec.Struct, frozen=True, kw_only=True):
    """[N] chosen, [N, m] ids and values of the m most probable tokens, best first, ties by lower id."""

    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor


class SampleOutput(msgspec.Struct, frozen=True, kw_only=True):
    #: [N] int64 on the device, valid until the next call; -1: the row's logits hold NaN; -2: no token was left.
    ids: Tensor
    #: Present when a row of the step asks for log-probabilities.
    logprobs: LogprobTensors | None = None


class VerifyRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows with drafts: row r's queries are the last token and its drafts, logits rows query_start[r] ..."""

    slots: Tensor
    #: [N+1] int32 into the logits' rows
    query_start: Tensor
    #: [N] int64: position of each row's first choice
    positions: Tensor
    #: [T] int64: the queries' ids (the last token, then the drafts)
    ids: Tensor
    #: [T] int64 index of each query's parent among its row's queries, -1 for the first; None: a chain.
    parents: Tensor | None
    #: [T, V] draft distributions for `rejection`, that of the first query of a row arbitrary; or None.
    probs: Tensor | None
    host_slots: tuple[int, ...]
    #: Queries of each row, when the host knows them, those of idle ones too; T is their sum.
    host_queries: tuple[int, ...] | None = None
    #: As in SampleRows; idle rows then come last, and keep what they like.
    key: Hashable = None


class VerifyOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Per row: the accepted path and the token chosen after it."""

    #: [N, 1 + k] int64: accepted draft ids, then the target's own choice, then -1. A choice that failed
    #: stands there as in SampleOutput.ids.
    ids: Tensor
    #: [N] int64, 1 + accepted drafts; clamped to the row's max_length and its first stop id.
    count: Tensor
    #: [N, 1 + k] int64: which of the row's queries the kept entries are (for compaction of a tree), -1 beyond.
    path: Tensor
    logprobs: LogprobTensors | None = None


class Sampler(ABC):
    """Chooses tokens. State of slots is the sampler's own; the runner opens a slot before its first rows.

    Invariants: logits are not changed; ids of a row depend on its logits, its slot's state and its position only;
    nothing synchronises the device, except in a sampler that declares `needs_host_token`.

    A capturable sampler keeps per-slot parameters on the device, at addresses that stay. A step recorded with some key
    serves every step with an equal `graph_key` and as many rows, whatever its slots, positions and logits; counts
    advance in the replay. `open` runs outside of the graph. Idle rows of such a step name a slot that the runner keeps
    for them and may never have opened, several the same one: they may hold anything and harm nobody.
    """

    #: sample and verify may be recorded into a CUDA graph, after one call with the same key and rows outside of it.
    capturable: bool = False
    #: The sampler needs the host's view of each token before the next: its rows never run ahead.
    needs_host_token: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]: ...

    @classmethod
    @abstractmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self: ...

    @classmethod
    def wants_probs(cls, options: Any) -> bool:
        """Whether `verify` wants the distributions that drafts were drawn from (VerifyRows.probs)."""
        return False

    @abstractmethod
    def open(self, openings: Sequence[SlotOpening]) -> None:
        """(Re)build the state of these slots; whatever was there is gone."""

    @abstractmethod
    def features(self, host_slots: Sequence[int]) -> frozenset[str]:
        """What these slots use, e.g. {"noise", "top_p", "penalties", "logprobs"}."""

    def graph_key(self, host_slots: Sequence[int]) -> Hashable:
        """The sampler's part of a captured step's key: equal for slots whose rows the same recorded work serves. Not
        None. As coarse as it can be: each value costs the runner a graph."""
        return self.features(host_slots)

    @abstractmethod
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        """logits [N, V], any float dtype, rows may be strided. Advances the slots' counts by the chosen ids."""

    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        """logits [T, V]. Accept drafts, choose one token more, advance the counts by what was kept."""
        raise NotImplementedError(f"{type(self).__name__} does not verify drafts")

    @abstractmethod
    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        """Log-probabilities of given targets [N] under logits [N, V], with the `top` best (prompt logprobs)."""
