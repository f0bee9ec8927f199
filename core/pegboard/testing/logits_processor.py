"""Conformance of logits processors: rows don't feel each other, and what a slot does follows from its text alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegboard.contracts.processor import LogitsProcessor, ProcessorNeed, ProcessorOpening, ProcessRows
from pegboard.contracts.sampler import SamplingParams
from pegboard.errors import InvalidRequest
from pegboard.processing import read_arguments

from .conformance import Candidate, Suite, check, no_synchronisation, normal, same_bits
from .raising import raises

SLOTS, MAX_LENGTH = 6, 128


class ProcessorSuite(Suite, standard=True):
    """A logits processor against `pegboard.contracts.processor`. Its author names arguments that it serves, and some
    that it must refuse; a processor that follows texts may name texts that are right for its arguments."""

    role = "logits_processor"

    #: Arguments that requests may give, as plain values.
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    #: Arguments that must be refused, by the model or by `check`.
    wrong: ClassVar[Sequence[Mapping[str, Any]]] = ({"no_such_argument": 1},)
    #: Tokens that may follow one another after `prompt`, with any of the examples.
    prompt: ClassVar[tuple[int, ...]] = (3, 1, 4, 1, 5)
    text: ClassVar[tuple[int, ...]] = (9, 2, 6, 5, 3, 5)
    vocab_size: ClassVar[int] = 61
    eos_ids: ClassVar[frozenset[int]] = frozenset([2])

    @classmethod
    def need(cls) -> ProcessorNeed:
        """What the part is made for."""
        return ProcessorNeed(
            device=cls.facts(),
            vocab_size=cls.vocab_size,
            slots=SLOTS,
            max_length=MAX_LENGTH,
            eos_ids=cls.eos_ids,
            tokenizer_json=cls.tokenizer_json(),
        )

    @classmethod
    def tokenizer_json(cls) -> str | None:
        """The tokenizer of `need`."""
        return None

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, ProcessorNeed]]:
        yield "the suite's need", cls.need()

    @pytest.fixture
    def processor(self, candidate: Candidate) -> LogitsProcessor:
        made: LogitsProcessor = candidate.create(self.need())
        return made

    def logits(self, rows: int, dtype: str = "float32", seed: int = 0) -> Tensor:
        return normal(rows, self.vocab_size, seed=seed).to(self.device, getattr(torch, dtype))

    def opened(self, processor: LogitsProcessor, slot: int, example: int, output: Sequence[int] = ()) -> None:
        values = self.examples[example % len(self.examples)]
        processor.open(
            ProcessorOpening(
                slot=slot,
                arguments=read_arguments(processor, "it", values),
                prompt=self.prompt,
                output=tuple(output),
                stop_ids=tuple(sorted(self.eos_ids)),
            )
        )

    def processed(
        self, processor: LogitsProcessor, logits: Tensor, slots: Sequence[int], drafts: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        found = logits.clone()
        processor.process(found, ProcessRows(slots=tuple(slots), drafts=tuple(tuple(own) for own in drafts)))
        return found

    def test_examples_are_served(self, processor: LogitsProcessor) -> None:
        for values in self.examples:
            processor.check(read_arguments(processor, "it", values), SamplingParams())

    def test_wrong_arguments_are_refused(self, processor: LogitsProcessor) -> None:
        for values in self.wrong:

            def ask(values: Mapping[str, Any] = values) -> None:
                processor.check(read_arguments(processor, "it", values), SamplingParams())

            raises(InvalidRequest, ask, f"arguments {values!r}")

    def test_any_dtype_in_place(self, processor: LogitsProcessor, dtype: str) -> None:
        """The tensor that is given is changed, and nothing becomes NaN."""
        for example in range(len(self.examples)):
            self.opened(processor, 0, example)
            logits = self.logits(1, dtype)
            processor.process(logits, ProcessRows(slots=(0,)))
            check(not bool(logits.isnan().any()), f"example {example}: logits became NaN in {dtype}")
            check(bool((logits > -torch.inf).any()), f"example {example}: no token is left in {dtype}")

    def test_process_changes_no_state(self, processor: LogitsProcessor) -> None:
        """It is called again when another row made it raise."""
        for example in range(len(self.examples)):
            self.opened(processor, 1, example)
            logits = self.logits(1)
            first = self.processed(processor, logits, [1])
            check(same_bits(first, self.processed(processor, logits, [1])), f"example {example}: two calls differ")

    def test_rows_are_independent(self, processor: LogitsProcessor) -> None:
        slots = list(range(SLOTS))
        for slot in slots:
            self.opened(processor, slot, slot, self.text[: slot % 3])
        logits = self.logits(SLOTS)
        alone = torch.cat([self.processed(processor, logits[slot : slot + 1], [slot]) for slot in slots])
        check(same_bits(alone, self.processed(processor, logits, slots)), "a row beside others is not as alone")
        turned = self.processed(processor, logits.flip(0), slots[::-1])
        check(same_bits(alone.flip(0), turned), "another order of rows gives something else")

    def test_opening_forgets(self, processor: LogitsProcessor) -> None:
        logits = self.logits(1)
        for example in range(len(self.examples)):
            self.opened(processor, 0, example)
            right = self.processed(processor, logits, [0])
            self.opened(processor, 2, example + 1, self.text)
            self.opened(processor, 2, example)
            check(same_bits(right, self.processed(processor, logits, [2])), "something of the slot's past is left")

    def test_accepted_tokens_are_as_an_opening_with_them(self, processor: LogitsProcessor) -> None:
        """A preempted request goes on as it would have."""
        if not processor.needs_host_token:
            pytest.skip("it does not follow the text")
        logits = self.logits(1)
        for example in range(len(self.examples)):
            self.opened(processor, 0, example)
            for known, token in enumerate(self.text, start=1):
                processor.accept(0, (token,))
                found = self.processed(processor, logits, [0])
                self.opened(processor, 3, example, self.text[:known])
                right = self.processed(processor, logits, [3])
                check(same_bits(found, right), f"example {example}: after {self.text[:known]}")
            self.opened(processor, 4, example)
            processor.accept(4, self.text)
            check(same_bits(found, self.processed(processor, logits, [4])), "several tokens at once differ")

    def test_drafts_are_followed_and_forgotten(self, processor: LogitsProcessor) -> None:
        """Row i of a sequence is processed as if drafts 0 .. i - 1 had been accepted; then they are not."""
        for example in range(len(self.examples)):
            drafts = self.text[:3]
            self.opened(processor, 0, example)
            self.opened(processor, 1, example)
            logits = self.logits(5)
            found = self.processed(processor, logits, [1, 0], [(), drafts])
            for count in range(4):
                self.opened(processor, 3, example, drafts[:count])
                right = self.processed(processor, logits[1 + count : 2 + count], [3])
                check(same_bits(found[1 + count : 2 + count], right), f"example {example}: after {count} drafts")
            again = self.processed(processor, logits[:1], [0])
            check(same_bits(again, self.processed(processor, logits[:1], [1])), "drafts were taken for good")

    def test_the_device_is_not_waited_for(self, processor: LogitsProcessor) -> None:
        for example in range(len(self.examples)):
            self.opened(processor, 0, example)
            logits = self.logits(1)
            processor.process(logits, ProcessRows(slots=(0,)))  # what is made once is made here
            with no_synchronisation(self.device):
                processor.process(logits, ProcessRows(slots=(0,)))
