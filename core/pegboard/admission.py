"""From a caller's Request to the sequences that the scheduler runs. Everything that can be known is refused here."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from .beams.search import count_listed
from .contracts.processor import LogitsProcessor
from .contracts.sampler import SamplingParams
from .contracts.scheduler import SequenceSpec
from .errors import InvalidRequest
from .noise import child_seed
from .processing import read_arguments
from .registry.options import listed, nearest
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
    #: Logits processors that a request may ask for, by name.
    processors: Mapping[str, LogitsProcessor]
    #: Beams of a request at most; 0: the scheduler serves none.
    max_beams: int
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
        sampling = request.sampling
        self.check(sampling)
        count = sampling.best_of or sampling.n
        if count > self.max_queue:
            name = "n" if sampling.best_of is None else "best_of"
            raise InvalidRequest(f"{name} is {count}, the queue holds {self.max_queue} sequences")
        prompt = self.encode(request)
        max_length = self._length(sampling, len(prompt))
        stop_ids = self._stop_ids(sampling)
        seed = (secrets.randbits(64) if sampling.seed is None else sampling.seed) & _SEED_MASK
        if sampling.best_of is not None and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # what they are ranked by
        return [
            SequenceSpec(
                id=f"{serial}/{index}",
                prompt=prompt,
                sampling=sampling,
                seed=child_seed(seed, index) if count > 1 else seed,
                max_length=max_length,
                stop_ids=stop_ids,
                priority=request.priority,
                arrival=arrival,
                deadline=None if request.timeout in (None, math.inf) else arrival + request.timeout,
                salt=request.salt,
                parent=f"{serial}/0" if index else None,
                needs_host_token=self.needs_host_token
                or any(self.processors[name].needs_host_token for name in sampling.processors),
                max_drafts=self.max_drafts if self._drafts_for(sampling) else 0,
            )
            for index in range(count)
        ]

    def _drafts_for(self, sampling: SamplingParams) -> bool:
        """Not where a processor serves one token at a time, and beams are chosen one by one."""
        return sampling.num_beams == 1 and all(self.processors[name].takes_drafts for name in sampling.processors)

    def _check_processors(self, sampling: SamplingParams) -> None:
        for name, values in sampling.processors.items():
            processor = self.processors.get(name)
            if processor is None:
                raise InvalidRequest(
                    f"this engine has no logits processor {name!r}{nearest(name, self.processors)}; it has "
                    f"{listed(self.processors)}: name it in the config's logits_processors"
                )
            arguments = read_arguments(processor, name, values)
            try:
                processor.check(arguments, sampling)
            except InvalidRequest as error:
                raise InvalidRequest(f"processors.{name}: {error}") from error
            except Exception as error:
                raise InvalidRequest(f"processors.{name}: checking its arguments failed: {error!r}") from error

    def check(self, sampling: SamplingParams) -> None:
        """InvalidRequest: no request to this engine may have these parameters, whatever its prompt."""
        check_sampling(sampling, self.vocab_size)
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop looks for texts, and there are none: {self.no_tokenizer}; use stop_token_ids")
        if sampling.num_beams > 1:
            self._check_beams(sampling, self._stop_ids(sampling))
        self._check_processors(sampling)

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_ids)

    def _check_beams(self, sampling: SamplingParams, stop_ids: frozenset[int]) -> None:
        if sampling.num_beams > self.max_beams:
            why = f"at most {self.max_beams} sequences run at once (max_rows)"
            if not self.max_beams:
                why = "this scheduler serves no beam search"
            raise InvalidRequest(f"num_beams is {sampling.num_beams}; {why}")
        listed = count_listed(sampling, stop_ids)
        if listed > self.vocab_size:
            raise InvalidRequest(
                f"num_beams is {sampling.num_beams}: with {len(stop_ids)} ids that end a text a step looks at {listed} "
                f"tokens, the model has {self.vocab_size}"
            )

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
