"""The logits processor `structured`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final, Self

from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from pegboard.contracts.processor import LogitsProcessor, ProcessorNeed, ProcessorOpening, ProcessRows
from pegboard.contracts.sampler import SamplingParams
from pegboard.errors import InvalidRequest, PegboardError

from .arguments import Arguments
from .bitmask import Bitmask
from .matching import Text, compile_grammar

#: Compiled grammars that are kept.
_MOST = 64
#: Of llguidance, as the extra `structured` asks for; 1.6 takes only one EOS token.
_LEAST_VERSION: Final = (1, 9)


class StructuredOutput(LogitsProcessor):
    """Tokens that the text could not go on with have -inf; EOS may come when the text is complete, and must when
    nothing can be added. The mask is made on the host, a bit a token, and applied on the device."""

    arguments = Arguments
    needs_host_token = True
    takes_drafts = True

    def __init__(self, need: ProcessorNeed) -> None:
        self._eos_ids = need.eos_ids
        self._tokenizer = LLTokenizer(
            need.tokenizer_json or "", n_vocab=need.vocab_size, eos_token=sorted(need.eos_ids)
        )
        self._bitmask = Bitmask(need.vocab_size)
        #: By Arguments.key(), at the beginning of a text; the one that was not used for longest goes first.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._texts: dict[int, Text] = {}

    @classmethod
    def refusals(cls, need: ProcessorNeed, options: Any) -> Sequence[str]:
        reasons = []
        found = version("llguidance")
        if tuple(int(part) for part in found.split(".")[:2]) < _LEAST_VERSION:
            reasons.append(f'needs llguidance 1.9 or later, not {found}: pip install "pegboard[structured]"')
        if need.tokenizer_json is None:
            reasons.append("the model has no tokenizer, so nobody knows what its tokens write")
        if not need.eos_ids:
            reasons.append("the model names no EOS token, so a complete text could not end")
        return reasons

    @classmethod
    def create(cls, need: ProcessorNeed, options: Any) -> Self:
        try:
            return cls(need)
        except ValueError as error:
            raise PegboardError(f"llguidance can't read this model's tokenizer: {error}") from error

    def check(self, arguments: Arguments, sampling: SamplingParams) -> None:
        if sampling.ignore_eos:
            raise InvalidRequest("ignore_eos is True: a complete text could not end")
        if sampling.min_tokens > 1:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}: a text that is complete before could not end; ask for longer "
                "texts by the schema, regex or grammar"
            )
        compile_grammar(arguments, self._tokenizer)

    def open(self, opening: ProcessorOpening) -> None:
        assert isinstance(opening.arguments, Arguments)
        text = Text(self._matcher(opening.arguments), self._eos_ids)
        text.accept(opening.output)
        self._texts[opening.slot] = text

    def _matcher(self, arguments: Arguments) -> LLMatcher:
        key = arguments.key()
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = compile_grammar(arguments, self._tokenizer)
            if len(self._compiled) > _MOST:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return found.deep_copy()

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        self._texts[slot].accept(tokens)

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        mask = self._bitmask.host(logits.shape[0], pinned=logits.is_cuda)
        at = 0
        for place, slot in enumerate(rows.slots):
            drafts = rows.drafts_of(place)
            self._texts[slot].fill(mask[at : at + 1 + len(drafts)], drafts)
            at += 1 + len(drafts)
        self._bitmask.apply(logits, mask)
