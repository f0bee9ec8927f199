"""Paged K/V of the layouts that the suites know: filling, reading back as numbers, poisoning.

A layout's name begins with the order of a page's axes: "nhd" is (S, K, D), "hnd" is (K, S, D), "hnd-..." has v turned,
(K, D, S). Quantized ones add `k_scale` and `v_scale` of (S, K) or (K, S): a number is scale times payload, a payload
of uint8 is offset binary, byte - 128. Letters as in contracts.attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...contracts.attention import KVLayout, LayerCache
from ...dtypes import torch_dtype

_INT8_STEPS = 127


def allocate(layout: KVLayout, pages: int, page_size: int, device: str) -> LayerCache:
    """A cache of zeros, as the runner makes it."""
    tensors = {
        spec.name: torch.zeros((pages, *spec.shape), dtype=torch_dtype(spec.dtype), device=device)
        for spec in layout.tensors
    }
    return LayerCache(layout=layout, group=0, page_size=page_size, tensors=tensors)


def fill_entries(cache: LayerCache, seed: int) -> None:
    """Random values of unit size in every entry of every page."""
    generator = torch.Generator().manual_seed(seed)
    views = _views(cache)
    for name in ("k", "v"):
        payload, scale = views[name], views.get(f"{name}_scale")
        whole = not payload.dtype.is_floating_point
        if whole:
            values = torch.randint(-_INT8_STEPS, _INT8_STEPS + 1, payload.shape, generator=generator)
            values += _zero(payload)
        else:
            values = torch.randn(payload.shape, generator=generator, dtype=torch.float64)
        payload.copy_(values.to(payload.dtype))
        if scale is not None:
            size = 2.0 / _INT8_STEPS if whole else 1.0
            drawn = torch.rand(scale.shape, generator=generator, dtype=torch.float64) + 0.5
            scale.copy_((drawn * size).to(scale.dtype))


def read_entries(cache: LayerCache, index: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the flat entries `index` [N] (page * S + offset): float64 [N, K, D] on the CPU, dequantised."""
    views, index = _views(cache), index.cpu()
    page, offset = index // cache.page_size, index % cache.page_size
    found = []
    for name in ("k", "v"):
        values = _at(views[name], page, offset).double() - _zero(views[name])
        scales = read_scales(cache, index, name)
        if scales is not None:
            values = values * scales
        elif not views[name].dtype.is_floating_point:
            raise AssertionError(f"layout {cache.layout.name!r} holds {name} as integers without {name}_scale")
        found.append(values)
    return found[0], found[1]


def read_scales(cache: LayerCache, index: Tensor, name: str) -> Tensor | None:
    """Scales of K or V at the flat entries `index` [N]: float64 [N, K, 1] on the CPU; None: the layout has none."""
    view, index = _views(cache).get(f"{name}_scale"), index.cpu()
    if view is None:
        return None
    return _at(view, index // cache.page_size, index % cache.page_size).double()[..., None]


def poison_entries(cache: LayerCache, keep: Tensor) -> None:
    """Make every entry NaN but the flat entries `keep`; payloads that have no NaN get their greatest value."""
    for view in _views(cache).values():
        poisoned = torch.ones(view.shape[0] * cache.page_size, dtype=torch.bool)
        poisoned[keep.cpu()] = False
        where = poisoned.view(view.shape[0], cache.page_size, *[1] * (view.dim() - 2)).to(view.device)
        if view.dtype.is_floating_point and view.dtype.itemsize > 1:
            view.masked_fill_(where, torch.nan)
        else:  # of float8_e4m3fn that is NaN
            view.view(torch.uint8).masked_fill_(where, 0xFF if view.dtype == torch.uint8 else 0x7F)


def raw_entries(cache: LayerCache, index: Tensor, tensors: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """What every tensor of the cache (or `tensors` of its layout) holds at the flat entries `index`, as it is."""
    if tensors is not None:
        cache = LayerCache(layout=cache.layout, group=cache.group, page_size=cache.page_size, tensors=tensors)
    page, offset = index.cpu() // cache.page_size, index.cpu() % cache.page_size
    return [_at(view, page, offset) for view in _views(cache).values()]


def _zero(payload: Tensor) -> int:
    """The payload that stands for 0."""
    return 128 if payload.dtype == torch.uint8 else 0


def _views(cache: LayerCache) -> Mapping[str, Tensor]:
    """The tensors with entries first: [pages, S, K, D], scales [pages, S, K]."""
    layout, size = cache.layout, cache.page_size
    names = {spec.name for spec in layout.tensors}
    order, _, variant = layout.name.partition("-")
    if names not in ({"k", "v"}, {"k", "v", "k_scale", "v_scale"}) or order not in ("nhd", "hnd"):
        raise AssertionError(
            f"the suite can't read layout {layout.name!r} of the tensors {', '.join(sorted(names))}: override "
            "fill_cache, read_cache and poison_cache in your suite"
        )
    views = {}
    for name, tensor in cache.tensors.items():
        if order == "nhd":
            view = tensor
        elif name == "v" and variant:
            view = tensor.permute(0, 3, 1, 2)
        else:
            view = tensor.transpose(1, 2)
        if view.shape[1] != size:
            shape = tuple(tensor.shape[1:])
            raise AssertionError(
                f"layout {layout.name!r}: {name} has pages of {shape}, not {size} entries in their place"
            )
        views[name] = view
    return views


def _at(view: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    page, offset = page.to(view.device), offset.to(view.device)
    if view.dtype.itemsize == 1:  # torch does not index float8 everywhere
        return view.view(torch.uint8)[page, offset].view(view.dtype).cpu()
    return view[page, offset].cpu()
