"""The layouts of GPTQ checkpoints: int32 words of neighbouring inputs, lowest bits first.

`qweight` [I bits/32, O], `qzeros` [G, O bits/32], `scales` [G, O], `g_idx` [I]: the group of each input; W = (code -
zero) * scale. Version 1 (checkpoint_format "gptq") stores zero points less one, so that 0 is stored as the largest
code; version 2 ("gptq_v2") as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.errors import ConfigError

from .codes import unpack, words_to_rows
from .layout import SCALE_STORAGES, Expected, Layout, SourceWeight
from .scheme import Fields, Scheme, Skipping, fields_of

_OVERRIDES: Final = frozenset({"bits", "group_size", "desc_act", "sym"})


@dataclass(frozen=True, kw_only=True)
class GptqLayout(Layout):
    version: int = 1

    def expected(self, source: str, rows: int, columns: int, names: Mapping[str, Any]) -> dict[str, Expected]:
        groups = self.groups(columns)
        found = {
            f"{source}.qweight": Expected((-(-columns * self.bits // 32), rows), ("int32",)),
            f"{source}.qzeros": Expected((groups, -(-rows * self.bits // 32)), ("int32",)),
            f"{source}.scales": Expected((groups, rows), SCALE_STORAGES),
        }
        index = f"{source}.g_idx"
        if self.ordered or index in names:
            found[index] = Expected((columns,), ("int32", "int64"))
        return found

    def read(self, checkpoint: Checkpoint, source: str, rows: int, columns: int) -> SourceWeight:
        zeros = unpack(words_to_rows(checkpoint.read(f"{source}.qzeros")), self.bits, rows)
        if self.version == 1:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        index = f"{source}.g_idx"
        given = self.ordered or index in checkpoint.tensors()
        return SourceWeight(
            codes=words_to_rows(checkpoint.read(f"{source}.qweight").T),
            scales=checkpoint.read(f"{source}.scales").T.contiguous(),
            zeros=zeros.T.contiguous(),
            group_of=self.group_of(index, checkpoint.read(index), columns) if given else None,
        )

    @property
    def scales_name(self) -> str:
        return "scales"


class DynamicScheme(msgspec.Struct, frozen=True):
    """Modules whose names begin with a match of a pattern have a layout of their own (None: dense); the first one
    counts."""

    patterns: tuple[tuple[str, Layout | None], ...]
    other: Scheme

    def layout(self, source: str) -> Layout | None:
        for pattern, layout in self.patterns:
            if re.match(pattern, source):
                return layout
        return self.other.layout(source)


def gptq_scheme(config: Mapping[str, Any]) -> Scheme:
    """ConfigError: what is no GPTQ checkpoint of 4 or 8 bits, all of it named."""
    fields = fields_of("gptq", config)
    version = fields.choice(
        ("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"), "export it in the plain GPTQ layout"
    )
    fields.choice(("is_marlin_format",), False, (False,), "export it in the plain GPTQ layout")
    fields.choice(("pack_dtype",), "int32", ("int32",), "export it with words of 32 bits")
    layout = _layout(fields, 2 if version == "gptq_v2" else 1)
    skipped = fields.names("modules_to_not_convert")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        fields.problem(f"dynamic is {dynamic!r}, must map patterns to settings")
        dynamic = {}
    patterns = tuple(_pattern(fields, key, values, layout) for key, values in dynamic.items())
    fields.finish()
    scheme = Skipping(layout, skipped)
    return DynamicScheme(patterns, scheme) if patterns else scheme


def _layout(fields: Fields, version: int) -> GptqLayout:
    return GptqLayout(
        bits=fields.choice(("bits",), 4, (4, 8), "quantize it to 4 or 8"),
        group=fields.group(("group_size",), 128),
        zeros=True,
        ordered=fields.choice(("desc_act",), False, (False, True), "it is a truth value"),
        version=version,
    )


def _pattern(fields: Fields, key: str, values: Any, layout: GptqLayout) -> tuple[str, Layout | None]:
    """ "-:pattern" skips, "+:pattern" and "pattern" override."""
    pattern = key.removeprefix("+:").removeprefix("-:")
    try:
        re.compile(pattern)
    except re.error as error:
        fields.problem(f"dynamic: {pattern!r} is no regular expression: {error}")
    if key.startswith("-:"):
        return pattern, None
    values = values if isinstance(values, Mapping) else {}
    strange = sorted(set(values) - _OVERRIDES)
    if strange:
        fields.problem(f"dynamic: {key!r} sets {', '.join(strange)}; known are {', '.join(sorted(_OVERRIDES))}")
    defaults = {"bits": layout.bits, "group_size": layout.group, "desc_act": layout.ordered}
    try:
        own = fields_of("gptq", {"quant_method": "gptq", **defaults, **values})
        made = _layout(own, layout.version)
        own.finish()
    except ConfigError as error:
        fields.problem(f"dynamic: {key!r}: {'; '.join(error.reasons)}")
        return pattern, layout
    return pattern, made
