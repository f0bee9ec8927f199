"""The ways of a quantizer's products, measured one by one; the fastest go into a table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ..config import EngineConfig, load_config
from ..contracts.quantizer import KernelTuner, TunedProduct
from ..devices import torch_device
from ..errors import ConfigError, PluginError
from ..needs import scheme_name
from ..registry.registry import Registry
from ..survey import Survey
from .metering import CudaMeter, Meter

logger = logging.getLogger("pegboard")

#: Rows of the products that are measured, unless told otherwise.
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Milliseconds of launches at a time: for all ways, and for those that came out ahead.
_BRIEF: Final = 0.5
_LONG: Final = 2.0
#: How many of them are measured again.
_FINALISTS: Final = 4


class TunedWay(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a product."""

    product: str
    way: str
    microseconds: float
    #: Of the way that is taken without a table.
    untuned_microseconds: float
    #: How many ways there are.
    ways: int


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    quantizer: str
    device: str
    out: str
    found: tuple[TunedWay, ...]


def tune(
    config: EngineConfig | Mapping[str, Any],
    out: Path,
    *,
    rows: Sequence[int] = ROWS,
    meter: Meter | None = None,
    plugins: Sequence[object] = (),
    say: Callable[[str], None] = logger.info,
) -> TuneReport:
    """Measure the ways of the config's quantizer for its model's linears with so many `rows`, and write the table for
    the quantizer's options into the file `out`. No weight is read.

    `meter`: by default what times launches on the config's device. ConfigError for what can't be tuned, before
    anything is measured; PluginError: no way gives the right result."""
    if not rows or min(rows) < 1:
        raise ConfigError(f"rows are {', '.join(map(str, rows)) or 'none'}, must be whole numbers from 1 on")
    _refuse_folder(out)
    survey = Survey(load_config(config), Registry.discover(plugins))
    try:
        name, tuner = _tuner(survey)
        meter = meter or CudaMeter(torch_device(survey.device))
        found = []
        for product in tuner.products(
            survey.spec.linears, survey.checkpoint.tensors(), survey.shard, sorted(set(rows))
        ):
            found.append(_fastest(product, meter, say))
    finally:
        survey.checkpoint.close()
    if not found:
        raise ConfigError(f"quantizer {name!r} has no kernels with a choice for the linears of this model")
    table = tuner.table({one.product: (one.way, one.microseconds) for one in found})
    out.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return TuneReport(quantizer=name, device=survey.device.name, out=str(out), found=tuple(found))


def _refuse_folder(out: Path) -> None:
    """ConfigError: no file can be written there; said before minutes of measuring."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"{out} can't be written: name a file in a folder that exists")


def _tuner(survey: Survey) -> tuple[str, KernelTuner]:
    """(name of the quantizer that the config has, what knows its ways)"""
    choice, need = survey.config.quantizer, survey.needs.quantizer
    decision = survey.decide("quantizer", choice, need, key=scheme_name(survey.checkpoint))
    if decision.winner is None:
        raise ConfigError("no quantizer can be used", decision.reasons)
    factory = survey.selection.factory("quantizer")
    if not hasattr(factory, "tuner"):
        able = [part.part.name for part in survey.registry.parts("quantizer") if hasattr(part.load(), "tuner")]
        raise ConfigError(
            f"quantizer {decision.winner!r} has nothing to tune; those that do: {', '.join(able) or 'none'}"
        )
    tuner = survey.selection.ask("quantizer", "tuner", need, survey.selection.options("quantizer"))
    if not isinstance(tuner, KernelTuner):
        raise PluginError(f"quantizer {decision.winner!r}: tuner gave {tuner!r}, must be a KernelTuner")
    return decision.winner, tuner


def _fastest(product: TunedProduct, meter: Meter, say: Callable[[str], None]) -> TunedWay:
    """Ways that come out wrong are left out: compilers have been wrong before."""
    meter.prepare([calls[0] for calls in product.ways.values()])
    brief: dict[str, float] = {}
    for way, calls in product.ways.items():
        calls[0]()
        if product.is_right():
            brief[way] = meter.microseconds(calls, _BRIEF)
        else:
            say(f"{product.name}: {way} gives a wrong result here and is left out")
    if not brief:
        raise PluginError(f"{product.name}: none of {len(product.ways)} ways gives the right result")
    untuned = next(iter(brief))
    again = {untuned, *sorted(brief, key=brief.__getitem__)[:_FINALISTS]}
    long = {way: meter.microseconds(product.ways[way], _LONG) for way in brief if way in again}
    best = min(long, key=long.__getitem__)
    say(f"{product.name}: {long[best]:.2f} us with {best}, {long[untuned]:.2f} without a table")
    return TunedWay(
        product=product.name,
        way=best,
        microseconds=long[best],
        untuned_microseconds=long[untuned],
        ways=len(product.ways),
    )
