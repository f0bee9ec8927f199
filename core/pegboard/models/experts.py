"""A mixture of experts in place of the MLP: a router sends each token through a few of many gated MLPs."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.ops import Activation, Norm, Ops
from pegboard.contracts.quantizer import Linear, LinearSpec


class ExpertLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and stored names."""

    #: Layers that have experts; the others have an MLP.
    layers: tuple[int, ...]
    count: int
    per_token: int
    intermediate_size: int
    #: The weights of a token's experts are scaled to sum up to 1.
    normalised: bool
    #: The weights are rounded to the dtype of what they multiply.
    rounded: bool
    #: Below "model.layers.<i>."
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def linears(self, layer: int, hidden_size: int) -> list[LinearSpec]:
        at = f"model.layers.{layer}.{self.block}"
        router = f"{at}.gate"
        specs = [LinearSpec(name=router, sources=(router,), in_features=hidden_size, out_features=(self.count,))]
        gate, up, down = self.names
        for expert in range(self.count):
            own = f"{at}.experts.{expert}"
            specs += [
                LinearSpec(
                    name=f"{own}.gate_up",
                    sources=(f"{own}.{gate}", f"{own}.{up}"),
                    in_features=hidden_size,
                    out_features=(self.intermediate_size,) * 2,
                ),
                LinearSpec(
                    name=f"{own}.down",
                    sources=(f"{own}.{down}",),
                    in_features=self.intermediate_size,
                    out_features=(hidden_size,),
                ),
            ]
        return specs

    def build(self, layer: int, linears: dict[str, Linear], activation: Activation) -> Experts:
        at = f"model.layers.{layer}.{self.block}"
        return Experts(
            router=linears[f"{at}.gate"],
            gate_up=tuple(linears[f"{at}.experts.{expert}.gate_up"] for expert in range(self.count)),
            down=tuple(linears[f"{at}.experts.{expert}.down"] for expert in range(self.count)),
            per_token=self.per_token,
            normalised=self.normalised,
            rounded=self.rounded,
            activation=activation,
        )


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens are grouped by expert, so that each expert is run once over its own: the host learns the sizes of the
    groups, which waits for the device once a layer."""

    router: Linear
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    per_token: int
    normalised: bool
    rounded: bool
    activation: Activation

    def forward(self, hidden: Tensor, norm: Norm, post_norm: Norm | None, ops: Ops) -> Tensor:
        """hidden [T, E] -> [T, E]"""
        x = ops.norm(hidden, norm)
        weights, chosen = self._route(x)
        order = chosen.argsort(stable=True)
        tokens = order // self.per_token
        out, first = torch.zeros_like(x), 0
        for expert, count in enumerate(chosen.bincount(minlength=len(self.down)).tolist()):
            if count:
                own = slice(first, first + count)
                gated = ops.project(x[tokens[own]], self.gate_up[expert], activation=self.activation)
                result = ops.project(gated, self.down[expert]) * weights[order[own], None]
                out.index_add_(0, tokens[own], result.to(out.dtype))
                first += count
        return hidden + out if post_norm is None else ops.norm(out, post_norm, residual=hidden)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts, [T * per_token] each, token by token; in float32 (float64 for float64)."""
        chances = self.router(x).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        weights, chosen = chances.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.to(x.dtype) if self.rounded else weights).flatten(), chosen.flatten()


def too_few_experts(per_token: int, count: int) -> list[str]:
    """As a reason why a config can't be served."""
    return [f"num_experts_per_tok is {per_token}, of {count} experts"] if per_token > count else []
