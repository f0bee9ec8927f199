"""Conformance of models: logits of a reference, however a text is cut into steps and whatever runs beside it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.contracts.model import ModelNeed
from pegboard.contracts.quantizer import Shard
from pegboard.dtypes import element_bytes
from pegboard.errors import CheckpointError

from .conformance import Candidate, Suite, check, same_bits, unchanged
from .engines import isolated_registry
from .model_use import SLOTS, Doctored, ModelUse, open_checkpoint
from .raising import raises

MAX_LENGTH = 96

#: Root mean square error of one token's logits, in units of their own root mean square.
TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1})


class ModelSuite(Suite, standard=True):
    """An architecture against `pegboard.contracts.model` and a reference implementation.

    A subclass overrides `write_checkpoint`, and `reference` unless transformers knows the architecture. Features:
    "taps" (hidden states of chosen layers)."""

    role = "model"
    features = ("taps",)

    #: How far logits may be off, by dtype; the reference runs in float32. See TOLERANCES.
    tolerances: ClassVar[Mapping[str, float]] = TOLERANCES
    #: Declared: stored tensors that the model rightly leaves alone.
    unused: ClassVar[tuple[str, ...]] = ()
    #: Declared: fields of config.json -> a value that must be refused, by a reason that names field or value.
    unsupported: ClassVar[Mapping[str, Any]] = {}
    #: Plugins that the checkpoint's reader comes from: objects or names of distributions (`isolated_registry`).
    plugins: ClassVar[Sequence[object]] = ()

    def write_checkpoint(self, path: Path) -> Path:
        """Write a small random checkpoint with a vocabulary of 100 at least and positions up to 96 into the folder
        `path`; what to open. `pegboard.testing.tiny.tiny_model` does it for what transformers knows."""
        raise NotImplementedError(f"{type(self).__name__} must override write_checkpoint")

    def reference(self, path: Path) -> Callable[[Tensor], Tensor]:
        """ids [n] int64 -> logits [n, V] of the checkpoint in float32. By transformers unless overridden."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.eval()

        def run(ids: Tensor) -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(ids[None], use_cache=False).logits[0]
            return logits

        return run

    # -- what tests are given

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint, made once."""
        return cls().write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, path: Path) -> Callable[[Sequence[int]], Tensor]:
        """expected(ids): the reference's logits [n, V]."""
        run = cls().reference(path)
        return lambda ids: run(torch.tensor(ids)).float()

    @pytest.fixture
    def checkpoint(self, path: Path) -> Iterator[Checkpoint]:
        opened = open_checkpoint(path, isolated_registry(self.plugins))
        yield opened
        opened.close()

    @pytest.fixture
    def load(self, candidate: Candidate, checkpoint: Checkpoint) -> Callable[..., ModelUse]:
        """load(checkpoint=..., dtype=..., taps=..., progress=...): the model, ready to run."""
        registry = isolated_registry(self.plugins)

        def make(source: Checkpoint = checkpoint, **fields: Any) -> ModelUse:
            return ModelUse(candidate, source, registry, facts=self.facts(), max_length=MAX_LENGTH, **fields)

        return make

    def compare(self, found: Tensor, expected: Tensor, dtype: str, what: str) -> None:
        """AssertionError naming the worst token where `found` [n, V] is off by more than the tolerance."""
        check(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        found, expected = found.double(), expected.double()
        error = (found - expected).square().mean(1).sqrt() / expected.square().mean(1).sqrt()
        error = error.nan_to_num(nan=torch.inf)
        worst = int(error.argmax())
        check(
            float(error[worst]) <= self.tolerances[dtype],
            f"{what}: those of token {worst} are off by {float(error[worst]):.2g}, allowed {self.tolerances[dtype]:g}",
        )

    # -- logits ------------------------------------------------------------------------------------------------------

    def test_logits_are_those_of_the_reference(
        self, load: Callable[..., ModelUse], expected: Callable[[Sequence[int]], Tensor], dtype: str
    ) -> None:
        """Of every token of a prompt: one token, whole pages, a page and one more, the longest there is."""
        use = load(dtype=dtype)
        for place, length in enumerate((1, 2, 16, 17, 50, MAX_LENGTH)):
            ids = tokens(length, seed=length)
            (found,) = use.logits((place % SLOTS, ids, 0))
            self.compare(found, expected(ids), dtype, f"logits of {length} tokens in {dtype}")

    def test_chunks_change_nothing(self, load: Callable[..., ModelUse], dtype: str) -> None:
        """A prompt in steps of any size gives the logits that it gives at once."""
        use, ids = load(dtype=dtype), tokens(60)
        (whole,) = use.logits((0, ids, 0))
        for slot, sizes in enumerate(((20, 40), (16, 16, 28), (2, 3, 5, 50)), 1):
            found, at = [], 0
            for size in sizes:
                found += use.logits((slot, ids[at : at + size], at))
                at += size
            self.compare(torch.cat(found), whole, dtype, f"logits of 60 tokens in chunks {sizes}")

    def test_decoding_continues_a_prompt(self, load: Callable[..., ModelUse], dtype: str) -> None:
        """Token after token gives what the same text gives at once, from the first token and from the middle."""
        use, ids = load(dtype=dtype), tokens(50)
        (whole,) = use.logits((0, ids, 0))
        for slot, first in ((1, 0), (2, 21)):
            found = use.logits((slot, ids[:first], 0)) if first else []
            for at in range(first, len(ids)):
                found += use.logits((slot, ids[at : at + 1], at))
            self.compare(torch.cat(found), whole, dtype, f"logits of a text decoded from token {first} on")

    def test_rows_do_not_depend_on_neighbours(self, load: Callable[..., ModelUse], dtype: str) -> None:
        """Decode rows, prompts and chunks side by side, in any order, give what each gives alone."""
        use = load(dtype=dtype)
        texts = [tokens(length, seed=length) for length in (40, 33, 25, 18)]
        alone = [use.logits((slot, text, 0))[0] for slot, text in enumerate(texts)]
        use = load(dtype=dtype)
        use.logits((2, texts[2][:24], 0))
        use.logits((1, texts[1][:20], 0), (3, texts[3][:17], 0))
        for _ in range(2):  # the second time over entries that are there already
            third, fourth, first, second = use.logits(
                (2, texts[2][24:], 24), (3, texts[3][17:], 17), (0, texts[0], 0), (1, texts[1][20:], 20)
            )
            found = ((first, alone[0]), (second, alone[1][20:]), (third, alone[2][24:]), (fourth, alone[3][17:]))
            for slot, (one, other) in enumerate(found):
                self.compare(one, other, dtype, f"logits of row {slot} beside others")

    def test_wanted_tokens_are_those_of_all(self, load: Callable[..., ModelUse], dtype: str) -> None:
        """Hidden states of `StepContext.outputs` are rows of all (or are all); what is left out is still written."""
        use = load(dtype=dtype)
        rows = [(0, tokens(9), 0), (1, tokens(14, seed=1), 0)]
        everything = use.forward(*rows).hidden
        for slot, wanted in enumerate(([8, 22], [], [3])):
            use = load(dtype=dtype)
            with torch.inference_mode():
                hidden = use.model.forward(use.context(rows, wanted)).hidden
            check(
                hidden.shape[0] in (len(wanted), 23), f"{hidden.shape[0]} hidden states, {len(wanted)} of 23 are wanted"
            )
            chosen = hidden if hidden.shape[0] == len(wanted) else hidden[wanted]
            if wanted:
                self.compare(chosen, everything[wanted], dtype, f"hidden states of tokens {wanted}")
            (after,) = use.logits((1, tokens(1, seed=slot), 14))
            whole = load(dtype=dtype).logits((1, tokens(14, seed=1) + tokens(1, seed=slot), 0))[0]
            self.compare(after, whole[14:], dtype, f"logits of the next token when {wanted} were wanted")

    # -- loading -----------------------------------------------------------------------------------------------------

    def test_missing_tensors_are_all_named(self, load: Callable[..., ModelUse], checkpoint: Checkpoint) -> None:
        """Each tensor that is used must be there; when several are not, one error names them all."""
        names = [name for name in checkpoint.tensors() if name not in self.unused]
        for name in names:
            error = self._refused(load, Doctored(checkpoint, hidden=[name]), f"a checkpoint without {name}")
            check(name in error, f"{name} is missing, and the error does not name it: {error}")
        gone = [names[0], names[len(names) // 2], names[-1]]
        error = self._refused(load, Doctored(checkpoint, hidden=gone), "a checkpoint without three tensors")
        left_out = [name for name in gone if name not in error]
        check(not left_out, f"{gone} are missing, and the error leaves out {left_out}: {error}")

    def test_misshapen_tensors_are_named(self, load: Callable[..., ModelUse], checkpoint: Checkpoint) -> None:
        """A tensor that is a row longer than the config says is an error with its name, not one row less."""
        for name, info in checkpoint.tensors().items():
            if name not in self.unused and info.shape:
                error = self._refused(load, Doctored(checkpoint, longer=[name]), f"a checkpoint with a longer {name}")
                # Fused linears may name the first source; the layer's name is what a user searches for.
                check(name in error or name.removesuffix(".weight").removesuffix(".bias") in error, error)

    @staticmethod
    def _refused(load: Callable[..., ModelUse], source: Checkpoint, what: str) -> str:
        return str(raises(CheckpointError, lambda: load(source), what))

    def test_every_tensor_is_read(self, load: Callable[..., ModelUse], checkpoint: Checkpoint) -> None:
        """What a checkpoint holds is part of the model, unless `unused` says that it isn't."""
        source = Doctored(checkpoint)
        load(source)
        left = sorted(set(source.tensors()) - source.read_names - set(self.unused))
        check(not left, f"tensors are not read: {left}; declare them in `unused` if that is right")

    def test_progress_is_told(self, load: Callable[..., ModelUse]) -> None:
        """Bytes done never go back, and end at the bytes in all."""
        told: list[tuple[int, int]] = []
        load(progress=lambda done, total: told.append((done, total)))
        check(bool(told), "progress was never called")
        check(told == sorted(told) and len({total for _, total in told}) == 1, f"progress goes {told}")
        check(bool(self.unused) or told[-1][0] == told[-1][1], f"loading ends at {told[-1][0]} of {told[-1][1]} bytes")

    # -- what it says of itself --------------------------------------------------------------------------------------

    def test_describes_what_it_holds(self, load: Callable[..., ModelUse], checkpoint: Checkpoint) -> None:
        """The memory plan is made from it, so parameters and bytes are exact; and so are the sizes."""
        use = load()
        spec = use.spec
        counted = spec.other_parameters
        for linear in spec.linears:
            outputs = sum(linear.out_features)
            counted += outputs * linear.in_features + linear.bias * outputs
        stored = sum(math.prod(i.shape) for name, i in checkpoint.tensors().items() if name not in self.unused)
        check(counted == stored, f"describes {counted} parameters, the checkpoint holds {stored}")
        infos = checkpoint.tensors()
        planned = sum(use.quantizer.bytes_for(linear, infos, Shard()) for linear in spec.linears)
        planned += spec.other_parameters * element_bytes("float32")
        held = use.model.weight_bytes
        check(held == planned, f"weight_bytes is {held}; what it describes plans {planned}")
        output = use.forward((0, tokens(5), 0))
        check(output.hidden.shape == (5, spec.hidden_size), f"hidden {tuple(output.hidden.shape)} of 5 tokens")
        width = use.logits((0, tokens(5), 0))[0].shape[1]
        check(width == spec.vocab_size, f"{width} logits, vocab_size is {spec.vocab_size}")
        check(spec.context_length >= MAX_LENGTH, f"a context of {spec.context_length}; the tests need {MAX_LENGTH}")

    def test_describe_reads_the_config_alone(self, candidate: Candidate, checkpoint: Checkpoint) -> None:
        """The same each time, from a plain copy, which it leaves as it was."""
        config = copy.deepcopy(dict(checkpoint.config))
        need = ModelNeed(config=config, device=self.facts())
        candidate.require(need)
        first = candidate.factory.describe(need)
        check(candidate.factory.describe(need) == first, "describe says something else each time")
        check(config == dict(checkpoint.config), "describe changed the config")

    def test_unsupported_configs_are_refused(self, candidate: Candidate, checkpoint: Checkpoint) -> None:
        """By the name of the field or its value; a config that is accepted is served."""
        if not self.unsupported:
            pytest.skip("nothing is declared unsupported")
        for field, value in self.unsupported.items():
            config = {**checkpoint.config, field: value}
            reasons = candidate.refusals(ModelNeed(config=config, device=self.facts()))
            named = any(field in reason or str(value) in reason for reason in reasons)
            check(named, f"{field} = {value!r}: {reasons or 'accepted'}")

    def test_taps_are_hidden_states(self, load: Callable[..., ModelUse]) -> None:
        """Of the layers that were asked for, in that order; the last layer's is `hidden`."""
        last = len(load().spec.layers) - 1
        output = load(taps=(last, 0)).forward((0, tokens(7), 0))
        if not output.taps and "taps" not in self.claims:
            pytest.skip("gives no hidden states, and does not claim to")
        shapes = [tuple(tap.shape) for tap in output.taps]
        check(shapes == [tuple(output.hidden.shape)] * 2, f"taps of shapes {shapes} for two layers")
        check(same_bits(output.taps[0], output.hidden), "the tap of the last layer is not its hidden state")
        check(not same_bits(output.taps[1], output.hidden), "the tap of the first layer is the last one's")

    def test_ends_are_those_of_the_logits(self, load: Callable[..., ModelUse]) -> None:
        """head(final(hidden)) are the logits, and embed has their size; nothing that is given changes."""
        use = load()
        if not use.model.shares_ends:
            pytest.skip("shares neither embedding nor head")
        with torch.inference_mode():
            hidden = use.forward((0, tokens(7), 0)).hidden
            expected = use.model.logits(hidden, use.ops)
            with unchanged(hidden=hidden):
                final = use.model.final(hidden, use.ops)
            with unchanged(final=final):
                logits = use.model.head(final, use.ops)
            ids = torch.tensor(tokens(7), device=use.device)
            with unchanged(ids=ids):
                embedded = use.model.embed(ids, use.ops)
        off = float((logits - expected).float().abs().max() / expected.float().abs().max())
        check(off < 1e-3, f"head(final(hidden)) differs from the logits by {off:.2g} of the greatest")
        check(final.shape == hidden.shape, f"final gives {tuple(final.shape)} for {tuple(hidden.shape)}")
        check(embedded.shape == hidden.shape, f"embed gives {tuple(embedded.shape)} for 7 ids")

    # -- the whole ---------------------------------------------------------------------------------------------------

    def test_nothing_but_the_cache_changes(self, load: Callable[..., ModelUse]) -> None:
        """Batch and weights stay as they are: the same step again gives the same bits."""
        use, ids = load(), tokens(20)
        context = use.context([(0, ids, 0)])
        batch = context.batch
        given = {"ids": batch.ids, "positions": batch.positions}
        given |= {f"write_index[{g}]": index for g, index in enumerate(batch.write_index)}
        with torch.inference_mode(), unchanged(**given):
            hidden = use.model.forward(context).hidden
            with unchanged(hidden=hidden):
                first = use.model.logits(hidden, use.ops).clone()
        again = use.logits((0, ids, 0))[0]
        check(same_bits(first.float().cpu(), again), "the same step gives other logits the second time")


def tokens(length: int, seed: int = 0) -> list[int]:
    """Ids from 3 to 99."""
    return torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
