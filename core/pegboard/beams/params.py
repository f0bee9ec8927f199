"""What sampling parameters beam search goes with."""

from __future__ import annotations

from typing import Final

from pegboard.contracts.sampler import SamplingParams

#: Parameters that would change what the beams are chosen by, and the values that don't.
_UNUSED: Final = {
    "temperature": (0.0, 1.0),
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "processors": ({},),
    "best_of": (None,),
    "stop": ((), []),
    "logprobs_mode": ("raw",),
}
#: Why they are refused.
_OWN: Final = "takes the model's own log-probabilities"
_WHY: Final = {
    "stop": "ends texts at end tokens and stop_token_ids",
    "best_of": "ranks its beams, num_beams of them",
    "processors": "does not run logits processors",
}


def beam_problems(params: SamplingParams) -> list[str]:
    """What is wrong with the parameters of beam search, each of which is of the right type and range."""
    if params.num_beams == 1:
        return [
            f"{name} is {getattr(params, name)!r}, which is for beam search: set num_beams"
            for name, default in (("length_penalty", 1.0), ("early_stopping", False))
            if getattr(params, name) != default
        ]
    wrong = [
        f"{name} is {getattr(params, name)!r}; beam search {_WHY.get(name, _OWN)}: leave it out"
        for name, fine in _UNUSED.items()
        if getattr(params, name) not in fine
    ]
    if params.n > params.num_beams:
        wrong.append(f"n is {params.n}; beam search gives at most num_beams, {params.num_beams}")
    return wrong
