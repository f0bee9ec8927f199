"""Logits processors: change what a request's tokens are chosen from. A config lists them, a request asks for those it
wants by name, with arguments (`SamplingParams.processors`).

They run between the model's head and the sampler, in the config's order, before penalties, bias and temperature; they
see the rows of requests that asked for them, and no others. State is kept by slot.

Letters: M rows of logits, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from .device import DeviceFacts
from .sampler import SamplingParams

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor


class ProcessorNeed(msgspec.Struct, frozen=True, kw_only=True):
    device: DeviceFacts
    #: Of the logits.
    vocab_size: int
    #: Slots are 0 .. slots-1.
    slots: int
    max_length: int
    #: The model's EOS ids.
    eos_ids: frozenset[int] = frozenset()
    #: The tokenizer, as the library `tokenizers` writes it; None: the model has none.
    tokenizer_json: str | None = None


class ProcessorOpening(msgspec.Struct, frozen=True, kw_only=True):
    """All that a slot's state is built from. Again after preemption, with the output so far."""

    slot: int
    #: As `check` has seen them: an instance of `LogitsProcessor.arguments`, None where that is None.
    arguments: BaseModel | None
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    #: Ids that end the text.
    stop_ids: tuple[int, ...] = ()


class ProcessRows(msgspec.Struct, frozen=True, kw_only=True):
    """Whose logits they are. A sequence has 1 + drafts rows of logits, one after another: the first is of the token
    after all that was accepted, row i of the one after drafts 0 .. i - 1, if those were chosen."""

    slots: tuple[int, ...]
    #: Of each slot, the drafts that are being verified; empty: none of any.
    drafts: tuple[tuple[int, ...], ...] = ()

    def drafts_of(self, place: int) -> tuple[int, ...]:
        return self.drafts[place] if self.drafts else ()


class LogitsProcessor(ABC):
    """One instance serves the steps, another one, maybe in another process, `check` at submission. Creating one puts
    nothing on the device; `open` and `process` may.

    An exception fails the request that it was raised for. `process` that raises is called again, one sequence at a
    time, to find out which that is: so it must change nothing but the logits that it is given.
    """

    #: The model of a request's arguments, pydantic with extra="forbid"; None: it takes none.
    arguments: ClassVar[type[BaseModel] | None] = None
    #: It follows the text: `accept` tells each token before the next is chosen, so requests with it never run ahead.
    needs_host_token: ClassVar[bool] = False
    #: `process` serves rows with drafts (`ProcessRows.drafts`); requests that ask for one that doesn't have none.
    takes_drafts: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: ProcessorNeed, options: Any) -> Sequence[str]: ...

    @classmethod
    @abstractmethod
    def create(cls, need: ProcessorNeed, options: Any) -> Self: ...

    def check(self, arguments: Any, sampling: SamplingParams) -> None:  # noqa: B027
        """InvalidRequest, with the reason: these arguments, valid by their model, can't be served, or not beside the
        request's other parameters. From any thread, several at a time."""

    @abstractmethod
    def open(self, opening: ProcessorOpening) -> None:
        """(Re)build the state of a slot; whatever was there is gone."""

    def accept(self, slot: int, tokens: Sequence[int]) -> None:  # noqa: B027
        """These tokens follow in the slot's text, for good. Called with `needs_host_token` only."""

    @abstractmethod
    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        """Change logits [M, V], of any float dtype, in place; M is the sum of 1 + drafts. -inf bans a token. Does not
        wait for the device."""
