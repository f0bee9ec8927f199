"""compressed-tensors' format pack-quantized, weights only: int32 words of neighbouring inputs, lowest bits first.

`weight_packed` [O, I bits/32] holds codes plus 2^(bits-1); `weight_scale` [O, G]; `weight_zero_point`, where weights
are asymmetric, int8 [O, G] or words of neighbouring outputs [O bits/32, G], plus 2^(bits-1); `weight_g_idx` [I] where
groups follow the activations' order; `weight_shape` is [O, I]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.errors import CheckpointError

from .codes import unpack, words_to_rows
from .layout import SCALE_STORAGES, Expected, Layout, SourceWeight
from .scheme import Fields, Scheme, fields_of


@dataclass(frozen=True, kw_only=True)
class PackQuantizedLayout(Layout):
    def expected(self, source: str, rows: int, columns: int, names: Mapping[str, Any]) -> dict[str, Expected]:
        groups = self.groups(columns)
        found = {
            f"{source}.weight_packed": Expected((rows, -(-columns * self.bits // 32)), ("int32",)),
            f"{source}.weight_scale": Expected((rows, groups), SCALE_STORAGES),
            f"{source}.weight_shape": Expected((2,), ("int64", "int32")),
        }
        if self.zeros:
            name = f"{source}.weight_zero_point"
            info = names.get(name)
            plain = getattr(info, "storage", None) == "int8"
            shape = (rows, groups) if plain else (-(-rows * self.bits // 32), groups)
            found[name] = Expected(shape, ("int8" if plain else "int32",))
        if self.ordered:
            found[f"{source}.weight_g_idx"] = Expected((columns,), ("int32", "int64"))
        return found

    def read(self, checkpoint: Checkpoint, source: str, rows: int, columns: int) -> SourceWeight:
        shape = checkpoint.read(f"{source}.weight_shape").tolist()
        if shape != [rows, columns]:
            raise CheckpointError(f"{source}.weight_shape says {shape}, expected {[rows, columns]}")
        index = f"{source}.weight_g_idx"
        return SourceWeight(
            codes=words_to_rows(checkpoint.read(f"{source}.weight_packed")),
            scales=checkpoint.read(f"{source}.weight_scale").contiguous(),
            zeros=self._zeros(checkpoint, f"{source}.weight_zero_point", rows) if self.zeros else None,
            group_of=self.group_of(index, checkpoint.read(index), columns) if self.ordered else None,
        )

    def _zeros(self, checkpoint: Checkpoint, name: str, rows: int) -> torch.Tensor:
        stored = checkpoint.read(name)
        if stored.dtype == torch.int8:
            return (stored.short() + (1 << (self.bits - 1))).to(torch.uint8)
        return unpack(words_to_rows(stored.T), self.bits, rows).T.contiguous()

    @property
    def scales_name(self) -> str:
        return "weight_scale"


class TargetScheme(msgspec.Struct, frozen=True):
    """`ignore` and the targets of the groups: module names, "re:" and a pattern, or the class "Linear"."""

    ignored: tuple[str, ...]
    targets: tuple[tuple[str, Layout], ...]

    def layout(self, source: str) -> Layout | None:
        if any(_names(entry, source) for entry in self.ignored):
            return None
        # A module's own name comes before a pattern, a pattern before its class
        ranked = sorted(self.targets, key=lambda target: (target[0] == "Linear", target[0].startswith("re:")))
        return next((layout for target, layout in ranked if target == "Linear" or _names(target, source)), None)


def compressed_tensors_scheme(config: Mapping[str, Any]) -> Scheme:
    """ConfigError: what is no weight-only checkpoint of 4 or 8 bits in the format pack-quantized, all of it named."""
    fields = fields_of("compressed-tensors", config)
    outer = config.get("format", "pack-quantized")
    if config.get("kv_cache_scheme"):
        fields.problem("kv_cache_scheme: scales of a quantized KV cache are not read; export it without")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        fields.problem("sparsity_config: sparse weights are not read; export them dense")
    if config.get("transform_config"):
        fields.problem("transform_config: transformed weights are not read; export them without")
    targets: list[tuple[str, Layout]] = []
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        fields.problem(f"config_groups is {groups!r}, must map names to targets and weights")
        groups = {}
    for name, group in groups.items():
        layout = _layout(fields, f"config_groups.{name}", group, outer)
        if layout is not None:
            targets += [(str(target), layout) for target in group.get("targets") or ("Linear",)]
    ignored = fields.names("ignore")
    for entry in (*ignored, *(target for target, _ in targets)):
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                fields.problem(f"{entry!r} holds no regular expression: {error}")
    fields.finish()
    return TargetScheme(ignored, tuple(targets))


def _layout(outer: Fields, where: str, group: Any, format: Any) -> Layout | None:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        outer.problem(f"{where} quantizes no weights")
        return None
    for kind in ("input_activations", "output_activations"):
        if group.get(kind):
            outer.problem(f"{where} quantizes {kind}: only weights are quantized here; export it as W4A16 or W8A16")
    fields = Fields(where, weights, outer)
    fields.choice((), group.get("format") or format, ("pack-quantized",), "export it as 'pack-quantized'", "format")
    fields.choice(("type",), "int", ("int",), "export it as 'pack-quantized' integers")
    fields.choice(("dynamic",), False, (False,), "weights have stored scales")
    # What the format's own reader infers
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = fields.choice(("strategy",), inferred, ("group", "channel"), "export it with groups or channels")
    order = fields.choice(
        ("actorder",),
        None,
        (None, False, "static", "weight", "group", "dynamic", True),
        "it is 'group', 'weight' or null",
    )
    return PackQuantizedLayout(
        bits=fields.choice(("num_bits",), 4, (4, 8), "quantize it to 4 or 8"),
        group=-1 if strategy == "channel" else fields.group(("group_size",), 128),
        zeros=not fields.choice(("symmetric",), True, (True, False), "it is a truth value"),
        ordered=order in ("group", "dynamic", True),
    )


def _names(entry: str, source: str) -> bool:
    return bool(re.match(entry[3:], source)) if entry.startswith("re:") else entry == source
