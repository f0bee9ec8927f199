"""Parts that record what they give, for one request at a time, and an executor that can switch them on."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, KVLayout, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.device import TensorSpec
from pegboard.contracts.model import DecoderModel, ModelOutput, StepContext
from pegboard.contracts.ops import Activation, Norm, Ops, Rope
from pegboard.contracts.quantizer import Linear, LinearSpec, Quantizer, Shard
from pegboard.contracts.sampler import LogprobTensors, SampleOutput, Sampler, SampleRows, SlotOpening

_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_MLP = re.compile(r"mlp|feed_forward|ffn|expert|moe")


class Key(NamedTuple):
    """See PartError."""

    layer: int | None
    part: str
    name: str


class Probe:
    """Keeps what the parts of one engine give while it is active. One request runs meanwhile, so the rows of a step are
    its tokens in order, whatever the steps."""

    def __init__(self, positions: int) -> None:
        """`positions`: how many tokens of a prompt are kept; those that are generated are kept all."""
        self.active = False
        #: Tokens that the request must choose, instead of its own.
        self.forced: Sequence[int] | None = None
        self._positions = positions
        self._records: dict[Key, list[Tensor]] = {}
        self._kept: dict[Key, int] = {}
        #: id of a linear -> (the linear, so that the id stays its own; its layer, its name)
        self._linears: dict[int, tuple[Linear, int | None, str]] = {}
        self._layer: int | None = None
        #: While logits are made of hidden states.
        self.in_head = False
        #: The linear that ran last.
        self.last = ""

    def begin(self, forced: Sequence[int] | None = None) -> None:
        self._records, self._kept, self.forced, self.active = {}, {}, forced, True

    def end(self) -> dict[Key, Tensor]:
        """Everything that was recorded, in the order of computation: rows are tokens."""
        self.active = False
        return {key: torch.cat(pieces) for key, pieces in self._records.items()}

    def name(self, linear: Linear, spec: LinearSpec) -> None:
        found = _LAYER.search(spec.name)
        layer, name = (int(found[1]), found[2]) if found else (None, spec.name)
        self._linears[id(linear)] = (linear, layer, name)

    def enter(self, layer: int | None) -> None:
        self._layer = layer

    def linear(self, linear: Linear) -> str:
        """Its name; what follows belongs to its layer."""
        _, self._layer, self.last = self._linears.get(id(linear), (linear, self._layer, "linear"))
        return self.last

    def put(self, part: str, name: str, x: Tensor) -> None:
        """x [T, ...]"""
        key = Key(self._layer, part, name)
        room = self._positions - self._kept.get(key, 0)
        kept = x if len(x) == 1 else x[: max(room, 0)]
        if len(x) > 1:
            self._kept[key] = self._kept.get(key, 0) + len(x)
        self._records.setdefault(key, []).append(kept.detach().to("cpu", copy=True))


class _MadeByCompare:
    """Parts around parts that exist: nobody can name them."""

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Sequence[str]:
        return ["is made by a comparison only"]

    @classmethod
    def create(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("made by a comparison only")


class ProbedQuantizer(_MadeByCompare, Quantizer):
    """Tells the probe which linear is which."""

    def __init__(self, main: Quantizer, probe: Probe) -> None:
        self._main, self._probe = main, probe

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return self._main.tensor_names(spec, names)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        return self._main.bytes_for(spec, stored, shard)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Linear:
        made = self._main.linear(spec, checkpoint, shard)
        self._probe.name(made, spec)
        return made


class ProbedModel(_MadeByCompare, DecoderModel):
    def __init__(self, main: DecoderModel, probe: Probe) -> None:
        self._main, self._probe = main, probe

    @classmethod
    def describe(cls, need: Any) -> NoReturn:
        raise NotImplementedError("made by a comparison only")

    def forward(self, context: StepContext) -> ModelOutput:
        self._probe.enter(None)
        return self._main.forward(context)

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        self._probe.enter(None)
        self._probe.in_head = True
        try:
            return self._main.logits(hidden, ops)
        finally:
            self._probe.in_head = False

    @property
    def weight_bytes(self) -> int:
        return self._main.weight_bytes


class ProbedAttention(_MadeByCompare, AttentionBackend[Any]):
    def __init__(self, main: AttentionBackend[Any], probe: Probe, layers: Mapping[int, int]) -> None:
        """`layers`: id of a layer's cache -> its number."""
        self._main, self._probe, self._layers = main, probe, layers

    @classmethod
    def layouts(cls, need: Any, layer: AttentionLayer, options: Any) -> NoReturn:
        raise NotImplementedError("made by a comparison only")

    def workspace(self) -> Sequence[TensorSpec]:
        return self._main.workspace()

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> Any:
        return self._main.plan(rows, layer, workspace)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = self._main.forward(q, k, v, cache, plan, sinks)
        self._probe.enter(self._layers[id(cache)])
        self._probe.put("attention", "attention", out)
        return out


class ProbedOps(_MadeByCompare, Ops):
    """A norm that is part of a projection is computed once more by the same ops, to be seen by itself."""

    def __init__(self, main: Ops, probe: Probe, layers: Mapping[int, int]) -> None:
        self._main, self._probe, self._layers = main, probe, layers

    def writes(self, layout: KVLayout) -> bool:
        return self._main.writes(layout)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        out = self._main.embed(ids, weight)
        self._probe.put("embedding", "embedding", out)
        return out

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        out = self._main.norm(x, norm, residual)
        self._probe.put("norm", f"after {self._probe.last}", out)
        return out

    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        name = self._probe.linear(linear)
        if norm is not None:
            self._probe.put("norm", f"before {name}", self._main.norm(x, norm))
        out = self._main.project(x, linear, norm=norm, activation=activation, residual=residual)
        if not self._probe.in_head:  # the sampler sees the logits in the end, soft cap included
            self._probe.put("mlp" if _MLP.search(name) else "projection", name, out)
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        out = self._main.gated(x, activation)
        self._probe.put("mlp", "gated", out)
        return out

    def rope_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        positions: Tensor,
        rope: Rope | None,
        cache: LayerCache,
        write_index: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out = self._main.rope_write(qkv, heads, positions, rope, cache, write_index, q_norm, k_norm)
        self._probe.enter(self._layers[id(cache)])
        self._probe.put("rope", "q", out[0])
        return out

    def copy_pages(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        self._main.copy_pages(cache, source, target)

    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        self._main.move_entries(cache, source, target)


class ProbedSampler(_MadeByCompare, Sampler):
    """Records the logits and its choice, and gives the forced one if there is any."""

    def __init__(self, main: Sampler, probe: Probe) -> None:
        self._main, self._probe = main, probe

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._main.open(openings)

    def features(self, host_slots: Sequence[int]) -> frozenset[str]:
        return self._main.features(host_slots)

    def graph_key(self, host_slots: Sequence[int]) -> Hashable:
        return self._main.graph_key(host_slots)

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out, probe = self._main.sample(logits, rows), self._probe
        probe.enter(None)
        probe.put("logits", "logits", logits)
        probe.put("sampler", "sampler", out.ids)
        if probe.forced is None:
            return out
        token, probe.forced = probe.forced[0], probe.forced[1:]
        return SampleOutput(ids=torch.full_like(out.ids, token), logprobs=out.logprobs)

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        return self._main.score(logits, targets, top)
