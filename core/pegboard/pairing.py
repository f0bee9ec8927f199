"""Whether parts that meet understand each other: one KV layout for the prefill and decode backends and the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .contracts.attention import AttentionLayer, KVLayout, StateLayer
from .contracts.cache import CacheGroup
from .contracts.ops import Ops
from .dtypes import element_bytes
from .errors import ConfigError


class Backend(NamedTuple):
    """An attention backend, as far as it matters here."""

    name: str
    #: What it reads for a layer, best first.
    layouts: Callable[[AttentionLayer], Sequence[KVLayout]]


def agree(layer: AttentionLayer, prefill: Backend, decode: Backend, ops: Ops) -> KVLayout:
    """The first layout of the prefill backend that all three know. ConfigError naming what each knows."""
    offers = [list(backend.layouts(layer)) for backend in (prefill, decode)]
    for layout in offers[0]:
        if layout in offers[1] and ops.writes(layout):
            return layout
    first, second = ([_name(layout) for layout in offer] for offer in offers)
    written = [_name(layout) for layout in [*offers[0], *offers[1]] if ops.writes(layout)]
    raise ConfigError(
        "the parts have no KV layout in common",
        [
            f"attention {prefill.name} reads {', '.join(first) or 'none'}",
            f"decode_attention {decode.name} reads {', '.join(second) or 'none'}",
            f"ops {type(ops).__name__} writes {', '.join(written) or 'none'} of these",
        ],
    )


def _name(layout: KVLayout) -> str:
    return f"{layout.name} ({', '.join(f'{t.name} {t.dtype} {t.shape}' for t in layout.tensors)})"


def make_groups(
    layers: Sequence[AttentionLayer | StateLayer], prefill: Backend, decode: Backend, ops: Ops
) -> tuple[CacheGroup, ...]:
    """Layers with the same layout and the same lifetime of entries share a group."""
    layouts = {layer: agree(layer, prefill, decode, ops) for layer in layers if isinstance(layer, AttentionLayer)}
    members: dict[tuple[KVLayout, str, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        key: tuple[KVLayout, str, int | None]
        if isinstance(layer, StateLayer):
            key = (KVLayout(name="state", tensors=layer.tensors), "state", None)
        else:
            key = (layouts[layer], "full" if layer.window is None else "window", layer.window)
        members.setdefault(key, []).append(index)
    return tuple(
        CacheGroup(
            index=number,
            kind=kind,  # type: ignore[arg-type]  # one of the two or three literals above
            layers=tuple(indices),
            layout=layout,
            window=window,
            page_bytes=len(indices) * layout_bytes(layout),
        )
        for number, ((layout, kind, window), indices) in enumerate(members.items())
    )


def layout_bytes(layout: KVLayout) -> int:
    """Bytes of one page of one layer."""
    total = 0
    for tensor in layout.tensors:
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        total += elements * element_bytes(tensor.dtype)
    return total
