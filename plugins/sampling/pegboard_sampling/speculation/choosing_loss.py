"""Cross entropy over a large vocabulary for a few places, without computing every logit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: Tokens that nobody expects here, among which the right one must stand out, drawn anew for each batch.
_OTHERS = 2048


def candidates(expected: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """[C] ascending: the expected ids [N], and others; the whole vocabulary where it is small."""
    if vocab_size <= 2 * _OTHERS:
        return torch.arange(vocab_size, device=expected.device)
    others = torch.randint(vocab_size, (_OTHERS,), generator=generator).to(expected.device)
    found: Tensor = torch.unique(torch.cat((expected.flatten(), others)))
    return found


def choice_loss(states: Tensor, expected: Tensor, matrix: Tensor, among: Tensor) -> Tensor:
    """Mean cross entropy of `expected` [N] under states [N, E] @ matrix [C, E], whose rows are the ids `among` [C]."""
    return functional.cross_entropy(states @ matrix.T, torch.searchsorted(among, expected))
