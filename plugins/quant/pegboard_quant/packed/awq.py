"""AutoAWQ's GEMM layout: W^T in int32 words of eight neighbouring outputs, even ones in the low half.

`qweight` [I, O/8], `qzeros` [G, O/8], `scales` [G, O]; W = (code - zero) * scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint

from .codes import pack, unpack, words_to_rows
from .layout import SCALE_STORAGES, Expected, Layout, SourceWeight
from .scheme import Scheme, Skipping, fields_of

#: Place within a word of the outputs 0 to 7: the words hold them as 0 2 4 6 1 3 5 7, lowest bits first.
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True)
class AwqLayout(Layout):
    def expected(self, source: str, rows: int, columns: int, names: Mapping[str, Any]) -> dict[str, Expected]:
        words, groups = -(-rows // 8), self.groups(columns)
        return {
            f"{source}.qweight": Expected((columns, words), ("int32",)),
            f"{source}.qzeros": Expected((groups, words), ("int32",)),
            f"{source}.scales": Expected((groups, rows), SCALE_STORAGES),
        }

    def read(self, checkpoint: Checkpoint, source: str, rows: int, columns: int) -> SourceWeight:
        return SourceWeight(
            codes=pack(_outputs_first(checkpoint.read(f"{source}.qweight"), rows), 4),
            scales=checkpoint.read(f"{source}.scales").T.contiguous(),
            zeros=_outputs_first(checkpoint.read(f"{source}.qzeros"), rows),
        )

    @property
    def scales_name(self) -> str:
        return "scales"


def _outputs_first(words: Tensor, rows: int) -> Tensor:
    """int32 [X, O/8] -> codes uint8 [O, X]"""
    codes = unpack(words_to_rows(words), 4, 8 * words.shape[1]).view(words.shape[0], -1, 8)
    return codes[:, :, torch.tensor(_PLACES)].flatten(1)[:, :rows].T.contiguous()


def awq_scheme(config: Mapping[str, Any]) -> Scheme:
    """ConfigError: what is no AWQ checkpoint of the GEMM layout, all of it named."""
    fields = fields_of("awq", config)
    bits = fields.choice(("bits", "w_bit"), 4, (4,), "AWQ has 4 bits")
    group = fields.group(("group_size", "q_group_size"), 128)
    fields.choice(("version", "checkpoint_format", "format"), "gemm", ("gemm", "GEMM"), "export it as 'gemm'")
    fields.choice(("zero_point",), True, (True,), "the GEMM layout stores zero points")
    skipped = fields.names("modules_to_not_convert")
    fields.finish()
    return Skipping(AwqLayout(bits=bits, group=group, zeros=True), skipped)
