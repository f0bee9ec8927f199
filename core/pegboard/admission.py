"""From a caller's Request to the sequences that the scheduler runs. Everything that can be known is refused here."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import msgspec

from .contracts.sampler import SamplingParams
from .contracts.scheduler import SequenceSpec
from .errors import InvalidRequest
from .noise import child_seed
from .request import Request, check_prompt_ids, check_request, check_sampling

if TYPE_CHECKING:
    from .text import Tokenizer

_SEED_MASK = 2**64 - 1


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's fixed limits, for checking requests."""

    tokenizer: Tokenizer | None
    #: Why there is none and what to do; "" when there is one.
    no_tokenizer: str
    #: Token ids of prompts are below this.
    vocab_size: int
    eos_ids: frozenset[int]
    #: Longest prompt + output that is admitted, and what it would be with a larger cache.
    max_length: int
    wanted_length: int
    #: The same, by what the whole cache can hold.
    capacity: int
    max_queue: int
    #: Every row needs the host to know its last token.
    needs_host_token: bool
    #: Of a row at most.
    max_drafts: int = 0

    def encode(self, request: Request) -> tuple[int, ...]:
        if not isinstance(request.prompt, str):
            return check_prompt_ids(request.prompt, self.vocab_size)
        if self.tokenizer is None:
            raise InvalidRequest(self.no_tokenizer)
        if not request.prompt.isascii():
            try:
                request.prompt.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"the prompt is no Unicode text: {error}") from None
        ids = self.tokenizer.encode(request.prompt, add_special=not request.special, allow_special=request.special)
        lacking = next((id for id in ids if id >= self.vocab_size), None)
        if lacking is not None:
            raise InvalidRequest(
                f"the prompt holds {self.tokenizer.token_text(lacking)!r}, which is token {lacking} of the tokenizer; "
                f"the model has none beyond {self.vocab_size - 1}: take another text, or the tokenizer of this model"
            )
        return check_prompt_ids(ids, self.vocab_size)

    def sequences(self, request: Request, serial: int, arrival: float) -> list[SequenceSpec]:
        """One a continuation; the first computes the prompt, the others fork from it. `serial` is never used twice, so
        that a late word about an ended sequence is never taken for a new one."""
        check_request(request)
        check_sampling(request.sampling, self.vocab_size)
        if request.sampling.n > self.max_queue:
            raise InvalidRequest(f"n is {request.sampling.n}, the queue holds {self.max_queue} sequences")
        prompt = self.encode(request)
        max_length = self._length(request.sampling, len(prompt))
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_ids)
        seed = (secrets.randbits(64) if sampling.seed is None else sampling.seed) & _SEED_MASK
        many = sampling.n > 1
        return [
            SequenceSpec(
                id=f"{serial}/{index}",
                prompt=prompt,
                sampling=sampling,
                seed=child_seed(seed, index) if many else seed,
                max_length=max_length,
                stop_ids=stop_ids,
                priority=request.priority,
                arrival=arrival,
                deadline=None if request.timeout in (None, math.inf) else arrival + request.timeout,
                salt=request.salt,
                parent=f"{serial}/0" if index else None,
                needs_host_token=self.needs_host_token,
                max_drafts=self.max_drafts,
            )
            for index in range(sampling.n)
        ]

    def _length(self, sampling: SamplingParams, prompt: int) -> int:
        limit = min(self.max_length, self.capacity)
        what = "the context" if limit == self.wanted_length else "the whole KV cache"
        wanted = prompt + (1 if sampling.max_tokens is None else sampling.max_tokens)
        if wanted > limit:
            new = "at least 1 new token" if sampling.max_tokens is None else f"max_tokens {sampling.max_tokens}"
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and {new} makes {wanted}: {what} holds {limit}; shorten the prompt or "
                "lower max_tokens"
            )
        return limit if sampling.max_tokens is None else wanted
