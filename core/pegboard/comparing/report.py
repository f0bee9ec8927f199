"""What a comparison gives. JSON: `msgspec.to_builtins`."""

from __future__ import annotations

import msgspec


class Side(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    device: str
    dtype: str
    parts: dict[str, str]


class PartError(msgspec.Struct, frozen=True, kw_only=True):
    """One result of the forward pass, the worst of all prompts."""

    #: None: before the first layer or after the last.
    layer: int | None
    #: "embedding", "norm", "projection", "rope", "attention", "mlp", "logits" or "sampler".
    part: str
    #: Which of them, e.g. "self_attn.qkv".
    name: str
    max_abs: float
    #: Greatest |b - a| / |a| of a token's vector; of the sampler the share of choices that the logits don't explain.
    relative: float
    differs: bool
    #: The prompt, from 0, where it is worst.
    prompt: int


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Of the two texts, each engine by itself."""

    prompts: int
    tokens: int
    #: Share of tokens that come before the first difference of their prompt.
    equal: float
    #: (prompt, token), both from 0, of the first difference; None: there is none.
    first_difference: tuple[int, int] | None


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second, one request at a time, all prompts together: the best of the repeats of each."""

    prefill: float
    #: None: one token a prompt, nothing to time.
    decode: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    a: Side
    b: Side
    #: Relative error that is tolerated.
    tolerance: float
    #: Nothing differs beyond the tolerance.
    agree: bool
    #: The first in the order of computation that differs.
    first: PartError | None
    #: In the order of computation.
    parts: list[PartError]
    tokens: Tokens
    #: Choices that differ while the logits agree within the tolerance, and are so close that their error decides.
    ties: int
    speed_a: Speed
    speed_b: Speed
