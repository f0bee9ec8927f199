"""Broken models, one for each rule: the suite catches every one of them, by the test that states the rule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.contracts.model import DecoderModel, ModelKit, ModelNeed, ModelOutput, ModelSpec, StepContext
from pegboard.contracts.ops import Ops
from pegboard.errors import CheckpointError
from pegboard.models.llama import Llama
from pegboard.testing.conformance import run_suite
from pegboard.testing.model import ModelSuite
from pegboard.testing.model_use import Doctored
from pegboard.testing.tiny import tiny_model


class Lenient(Doctored):
    """Gives zeros for what is missing."""

    def __init__(self, base: Checkpoint, spec: ModelSpec) -> None:
        super().__init__(base)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for linear in spec.linears:
            for source, size in zip(linear.sources, linear.out_features, strict=True):
                self._shapes[f"{source}.weight"] = (size, linear.in_features)
                self._shapes[f"{source}.bias"] = (size,)
        some = next(iter(base.tensors().values()))
        self._infos = dict(self._infos) | {
            name: replace(some, name=name, shape=shape)
            for name, shape in self._shapes.items()
            if name not in self._infos and name.endswith("q_proj.weight")
        }

    def read(self, name: str, **how: Any) -> Tensor:
        if name in self._base.tensors():
            return super().read(name, **how)
        return torch.zeros(self._shapes[name])


class Cut(Doctored):
    """Takes what it needs of a tensor that is too long."""

    def __init__(self, base: Checkpoint, spec: ModelSpec) -> None:
        super().__init__(base)
        self._sizes = {
            f"{source}.weight": (size, linear.in_features)
            for linear in spec.linears
            for source, size in zip(linear.sources, linear.out_features, strict=True)
        }
        self._infos = {n: replace(i, shape=self._sizes.get(n, i.shape)) for n, i in self._infos.items()}

    def read(self, name: str, **how: Any) -> Tensor:
        found = super().read(name, **how)
        return found[: self._sizes[name][0]] if name in self._sizes and not how.get("start") else found


class OffByAPercent(Llama):
    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        return super().logits(hidden, ops) * 1.01


class StartsOver(Llama):
    """Counts positions from the step's beginning."""

    def forward(self, context: StepContext) -> ModelOutput:
        batch = context.batch
        starts = batch.ids.new_zeros(batch.ids.shape)
        if batch.decode is None:
            starts = torch.arange(len(batch.ids), device=batch.ids.device)
        return super().forward(with_batch(context, positions=starts))


def with_batch(context: StepContext, **changes: Any) -> StepContext:
    return replace(context, batch=replace(context.batch, **changes))


class FreshChunks(Llama):
    """Positions of a chunk are those of a prompt."""

    def forward(self, context: StepContext) -> ModelOutput:
        batch = context.batch
        if batch.prefill is not None and batch.decode is None and len(batch.prefill[0].kv_len) == 1:
            start = batch.positions[0]
            return super().forward(with_batch(context, positions=batch.positions - start))
        return super().forward(context)


class FrozenDecode(Llama):
    """Every decoded token stands at position 0."""

    def forward(self, context: StepContext) -> ModelOutput:
        batch = context.batch
        if batch.prefill is None and len(batch.ids) == 1 and int(batch.positions[0]):
            return super().forward(with_batch(context, positions=batch.positions * 0))
        return super().forward(context)


class Pools(Llama):
    """Centres what it gives over all rows of a step."""

    def forward(self, context: StepContext) -> ModelOutput:
        output = super().forward(context)
        rows = sum(len(side[0].kv_len) for side in (context.batch.decode, context.batch.prefill) if side is not None)
        if rows == 1:
            return output
        return replace(output, hidden=output.hidden - output.hidden.mean(0, keepdim=True))


class Forgiving(Llama):
    """Loads zeros for q projections that are not there."""

    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        return super().create(replace(kit, checkpoint=Lenient(kit.checkpoint, kit.spec)))


class NamesOne(Llama):
    """Gives up at the first tensor that is missing."""

    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        try:
            return super().create(kit)
        except CheckpointError as error:
            raise CheckpointError("\n".join(str(error).splitlines()[:2])) from None


class Cuts(Llama):
    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        return super().create(replace(kit, checkpoint=Cut(kit.checkpoint, kit.spec)))


class Copies(Doctored):
    """The first layer's norm in place of the last norm."""

    def read(self, name: str, **how: Any) -> Tensor:
        return super().read("model.layers.0.input_layernorm.weight" if name == "model.norm.weight" else name, **how)


class SkipsNorm(Llama):
    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        return super().create(replace(kit, checkpoint=Copies(kit.checkpoint)))


class Silent(Llama):
    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        return super().create(replace(kit, progress=None))


class Overweight(Llama):
    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + 4


class Underestimates(Llama):
    @classmethod
    def describe(cls, need: ModelNeed) -> ModelSpec:
        spec = super().describe(need)
        return replace(spec, other_parameters=spec.other_parameters - spec.hidden_size)


class Scribbles(Llama):
    """Writes its defaults into the config."""

    @classmethod
    def describe(cls, need: ModelNeed) -> ModelSpec:
        need.config["seen"] = True  # type: ignore[index]
        return super().describe(need)


class AcceptsAll(Llama):
    @classmethod
    def refusals(cls, need: ModelNeed, options: Any) -> Sequence[str]:
        return []


class NoTaps(Llama):
    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        return super().create(replace(kit, taps=()))


class OrderlessTaps(Llama):
    """Gives taps in the order of the layers."""

    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        return super().create(replace(kit, taps=tuple(sorted(kit.taps))))


class NormsAgain(Llama):
    """Its head takes states for those before the final norm."""

    def head(self, final: Tensor, ops: Ops) -> Tensor:
        return super().logits(final, ops)


class Drifts(Llama):
    """Every step leaves a trace."""

    calls = 0

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        self.calls += 1
        return super().logits(hidden, ops) + 1e-6 * self.calls


class Overwrites(Llama):
    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        logits = super().logits(hidden, ops)
        hidden.zero_()
        return logits


class KeepsTheFirst(Llama):
    """Gives as many hidden states as are wanted, and the wrong ones."""

    def forward(self, context: StepContext) -> ModelOutput:
        output = super().forward(replace(context, outputs=None))
        return output if context.outputs is None else replace(output, hidden=output.hidden[: len(context.outputs)])


class WritesTheWanted(Llama):
    """The last layer forgets the keys of tokens that nobody wants."""

    def forward(self, context: StepContext) -> ModelOutput:
        if context.outputs is None:
            return super().forward(context)
        kept = [tensor.clone() for tensor in context.caches[-1].tensors.values()]
        output = super().forward(context)
        for tensor, before in zip(context.caches[-1].tensors.values(), kept, strict=True):
            tensor.copy_(before)
        return output


#: The rule's own test, then others that see it, too.
BROKEN: dict[type[DecoderModel], str] = {
    OffByAPercent: "test_logits_are_those_of_the_reference test_ends_are_those_of_the_logits",
    FreshChunks: "test_chunks_change_nothing",
    FrozenDecode: "test_decoding_continues_a_prompt test_wanted_tokens_are_those_of_all",
    Pools: "test_rows_do_not_depend_on_neighbours test_wanted_tokens_are_those_of_all",
    KeepsTheFirst: "test_wanted_tokens_are_those_of_all",
    WritesTheWanted: "test_wanted_tokens_are_those_of_all",
    StartsOver: (
        "test_decoding_continues_a_prompt test_chunks_change_nothing test_rows_do_not_depend_on_neighbours "
        "test_wanted_tokens_are_those_of_all"
    ),
    Forgiving: "test_missing_tensors_are_all_named",
    NamesOne: "test_missing_tensors_are_all_named",
    Cuts: "test_misshapen_tensors_are_named",
    SkipsNorm: "test_every_tensor_is_read test_logits_are_those_of_the_reference",
    Silent: "test_progress_is_told",
    Overweight: "test_describes_what_it_holds",
    Underestimates: "test_describes_what_it_holds",
    Scribbles: "test_describe_reads_the_config_alone",
    AcceptsAll: "test_unsupported_configs_are_refused",
    NoTaps: "test_taps_are_hidden_states",
    OrderlessTaps: "test_taps_are_hidden_states",
    NormsAgain: "test_ends_are_those_of_the_logits",
    Drifts: "test_nothing_but_the_cache_changes",
    Overwrites: "test_nothing_but_the_cache_changes test_ends_are_those_of_the_logits",
}


@cache
def _made(folder: Path) -> Path:
    return tiny_model(folder / "model", num_hidden_layers=2, tokenizer=False)


class Tiny(ModelSuite):
    claims = ("taps",)
    unsupported = {"hidden_act": "relu6"}
    folder: Path

    def write_checkpoint(self, path: Path) -> Path:
        return _made(self.folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught_by_its_test(broken: type[DecoderModel], folder: Path) -> None:
    """And by no other than those that the table names: with PEGBOARD_FULL the whole suite is run for that."""
    own, *others = BROKEN[broken].split()
    full = bool(os.environ.get("PEGBOARD_FULL"))
    suite = type("Broken", (Tiny,), {"part": broken, "folder": folder})
    failed = {outcome.test for outcome in run_suite(suite, "" if full else own) if outcome.result == "failed"}
    assert failed == ({own, *others} if full else {own})
