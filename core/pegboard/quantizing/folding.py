"""Where the scales of a linear's inputs can go: into the weight of the norm before it, or, for the last linear of a
gated MLP, into the rows of the one before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor

from ..contracts.checkpoint import Checkpoint
from ..contracts.quantizer import LinearSpec
from ..errors import ConfigError

#: Ends of linears' names -> that of the norm whose result they alone read.
_NORMS: Final[Mapping[str, str]] = {
    ".self_attn.qkv_proj": ".input_layernorm.weight",
    ".mlp.gate_up_proj": ".post_attention_layernorm.weight",
}
#: Norms that stand elsewhere, or whose weights are added to 1.
_FOREIGN: Final = (".pre_feedforward_layernorm.weight",)


class Folding:
    """The linears' weights, fused, and norms of one checkpoint, while scales move between them."""

    def __init__(self, specs: Sequence[LinearSpec], checkpoint: Checkpoint) -> None:
        """ConfigError: a model whose norms are not of the kind that can take scales."""
        stored = checkpoint.tensors()
        foreign = [name for name in stored if name.endswith(_FOREIGN)]
        if foreign:
            raise ConfigError(f"no scales can be folded into norms like {foreign[0]}: use method 'gptq' or 'rtn'")
        self._specs = {spec.name: spec for spec in specs}
        self._checkpoint = checkpoint
        #: What the norms became, by name.
        self.norms: dict[str, Tensor] = {}

    def norm_of(self, name: str) -> str | None:
        """The norm that takes the scales of this linear's inputs."""
        for end, norm in _NORMS.items():
            found = name.removesuffix(end) + norm
            if name.endswith(end) and found in self._checkpoint.tensors():
                return found
        return None

    def above(self, name: str) -> str | None:
        """The gate_up linear whose second half takes the scales of this linear's inputs."""
        found = name.removesuffix("down_proj") + "gate_up_proj"
        spec = self._specs.get(found)
        return found if name.endswith(".down_proj") and spec is not None and not spec.bias else None

    def fold(self, name: str, weights: Mapping[str, Tensor], scales: Callable[[Tensor], Tensor]) -> None:
        """Multiply the columns of the linear with `scales` of its weight, in place, and take them back before it."""
        norm, above = self.norm_of(name), self.above(name)
        weight = weights[name]
        if norm is not None:
            factors = scales(weight)
            self.norms[norm] = self._checkpoint.read(norm, dtype="float32") / factors
        elif above is not None and above in weights:
            factors = scales(weight)
            weights[above][-len(factors) :] /= factors[:, None]
        else:
            return
        weight *= factors
