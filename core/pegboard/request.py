"""What a caller asks for and what comes back. Checked once, at admission, with a reason for every refusal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import msgspec

from .beams.params import beam_problems
from .contracts.observer import RequestMetrics
from .contracts.sampler import SamplingParams, TokenLogprobs
from .contracts.scheduler import FinishReason
from .errors import DeadlineExceeded, InvalidRequest, RequestFailed

#: A prompt as text or as token ids.
Prompt = str | Sequence[int]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with how to continue it."""

    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    #: Higher runs earlier.
    priority: int = 0
    #: Seconds from submission after which it ends with "deadline".
    timeout: float | None = None
    #: Prefix reuse only happens between requests of the same salt.
    salt: str = ""
    #: Whether special tokens written in a text prompt ("<|im_start|>") are taken as such. Chat templates need it.
    special: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: RequestMetrics
    #: One a token, when asked for.
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    #: What `best_of` or beam search ranked it by; None without.
    score: float | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that came of one request."""

    id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    #: For prompt tokens 1, 2, ... (the first has no predecessor), when asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    #: Set when the request could not be admitted or did not finish.
    error: str | None = None

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text if self.completions else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids if self.completions else ()

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason if self.completions else "error"

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics if self.completions else RequestMetrics()

    def raise_for_error(self) -> RequestOutput:
        """Return self, or raise DeadlineExceeded or RequestFailed when a completion ended so."""
        if self.error is not None:
            late = any(c.finish_reason == "deadline" for c in self.completions)
            raise (DeadlineExceeded if late else RequestFailed)(
                f"request {self.id}: {self.error}" if self.id else self.error
            )
        return self


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is new in one continuation. The last one of each index has a finish_reason."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    #: With a finish_reason, as in Completion.
    score: float | None = None


def check_options(options: Mapping[str, Any]) -> None:
    """InvalidRequest for keywords that are no fields of Request, with what was probably meant."""
    for name in options:
        if name in Request.__struct_fields__:
            continue
        if name in SamplingParams.__struct_fields__:
            raise InvalidRequest(f"{name} is a sampling parameter: pass SamplingParams({name}=...)")
        fields = ", ".join(field for field in Request.__struct_fields__ if field not in ("prompt", "sampling"))
        raise InvalidRequest(f"there is no option {name!r} of a request; there are {fields}")


def check_request(request: Request) -> None:
    """InvalidRequest for fields of a wrong type, beside the prompt and the sampling parameters."""
    wrong: list[str] = []
    if not isinstance(request.sampling, SamplingParams):
        wrong.append(f"sampling is {request.sampling!r:.100}, must be SamplingParams; a Request carries its own")
    if not _is_whole(request.priority):
        wrong.append(f"priority is {request.priority!r}, must be a whole number")
    timeout = request.timeout
    if timeout is not None and not (_is_number(timeout) and timeout > 0):
        wrong.append(f"timeout is {timeout!r}, must be a number of seconds above 0, or None")
    if not isinstance(request.salt, str):
        wrong.append(f"salt is {request.salt!r}, must be a string")
    if not isinstance(request.special, bool):
        wrong.append(f"special is {request.special!r}, must be True or False")
    if wrong:
        raise InvalidRequest("the request is not valid: " + "; ".join(wrong))


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """InvalidRequest naming every field that is wrong, what it is, and what it may be."""
    wrong: list[str] = []

    def number(name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(params, name)
        fine = _is_number(value) and math.isfinite(value) and low <= value <= high
        if not fine or (open_low and value == low):
            wrong.append(f"{name} is {value!r}, must be a number {'above' if open_low else 'from'} {low} to {high}")

    def whole(name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(params, name)
        if optional and value is None:
            return
        if not _is_whole(value) or not low <= value <= high:
            wrong.append(f"{name} is {value!r}, must be a whole number from {low} to {high}")

    whole("max_tokens", 1, 2**31 - 1, optional=True)
    whole("min_tokens", 0, 2**31 - 1)
    number("temperature", 0.0, 1e4)
    whole("top_k", 0, 2**31 - 1)
    number("top_p", 0.0, 1.0)
    number("min_p", 0.0, 1.0)
    number("repetition_penalty", 0.0, 1e4, open_low=True)
    number("presence_penalty", -1e4, 1e4)
    number("frequency_penalty", -1e4, 1e4)
    whole("seed", -(2**63), 2**64 - 1, optional=True)
    whole("n", 1, 1024)
    whole("best_of", 1, 1024, optional=True)
    whole("num_beams", 1, 1024)
    number("length_penalty", -4.0, 4.0)
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        wrong.append(f"early_stopping is {params.early_stopping!r}, must be True, False or 'never'")
    whole("logprobs", 0, vocab_size, optional=True)
    whole("prompt_logprobs", 0, vocab_size, optional=True)
    if params.logprobs_mode not in ("raw", "processed"):
        wrong.append(f"logprobs_mode is {params.logprobs_mode!r}, must be 'raw' or 'processed'")
    if not wrong and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        wrong.append(f"min_tokens is {params.min_tokens}, must not exceed max_tokens, {params.max_tokens}")
    for name in ("include_stop", "ignore_eos"):
        if not isinstance(getattr(params, name), bool):
            wrong.append(f"{name} is {getattr(params, name)!r}, must be True or False")
    listed = isinstance(params.stop, list | tuple)
    if not listed or not all(isinstance(text, str) and text for text in params.stop):
        wrong.append(f"stop is {params.stop!r}, must be a list of non-empty strings")
    wrong += _ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if not isinstance(params.logit_bias, Mapping):
        wrong.append(f"logit_bias is {params.logit_bias!r}, must map token ids to numbers")
    else:
        wrong += _ids("logit_bias", tuple(params.logit_bias), vocab_size)
        wrong += [
            f"logit_bias of token {token} is {bias!r}, must be a finite number or -inf"
            for token, bias in params.logit_bias.items()
            if not _is_number(bias) or math.isnan(bias) or bias == math.inf
        ]
    asked = params.processors
    if not isinstance(asked, Mapping) or not all(
        isinstance(name, str) and isinstance(arguments, Mapping) for name, arguments in asked.items()
    ):
        wrong.append(f"processors is {asked!r:.100}, must map names of logits processors to their arguments")
    if not wrong:
        wrong += beam_problems(params)
        if params.best_of is not None and params.best_of < params.n:
            wrong.append(f"best_of is {params.best_of}, must be at least n, {params.n}")
    if wrong:
        raise InvalidRequest("sampling parameters are not valid: " + "; ".join(wrong))


def _is_whole(value: Any) -> TypeGuard[int]:
    """numpy's integers count, too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return _is_whole(value) or isinstance(value, float)


def _ids(name: str, ids: Sequence[Any], vocab_size: int) -> list[str]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        return [f"{name} is {ids!r}, must be a list of token ids"]
    bad = [i for i in ids if not _is_whole(i) or not 0 <= i < vocab_size]
    return [f"{name} holds {bad[0]!r}, must be token ids from 0 to {vocab_size - 1}"] if bad else []


def check_prompt_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    """InvalidRequest for what is no list of ids, an empty one, or an id that the model does not have."""
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray):
        raise InvalidRequest(f"the prompt is {ids!r:.100}, must be a text or a list of token ids")
    if len(ids) == 0:
        raise InvalidRequest("the prompt is empty: give at least one token (a BOS token, for a model that has one)")
    if isinstance(ids[0], str | Request):
        raise InvalidRequest(
            f"one prompt is expected here, a text or a list of token ids from 0 to {vocab_size - 1}; `Engine.generate` "
            "takes many"
        )
    wrong = _ids("the prompt", ids, vocab_size)
    if wrong:
        raise InvalidRequest(wrong[0])
    return tuple(int(i) for i in ids)
