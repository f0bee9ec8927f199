"""A checkpoint quantized: statistics of calibration text, linears written by a quantizer part, perplexity before and
after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from ..config import load_config
from ..contracts.quantizer import LinearSpec, LinearStatistics, WeightWriter
from ..contracts.sampler import SamplingParams
from ..engine import Engine
from ..errors import ConfigError
from ..registry.options import nearest
from ..registry.registry import Registry
from ..survey import Survey
from ..text import load_tokenizer
from .folder import dense_tensor, refuse_used, write_folder
from .folding import Folding
from .perplexity import perplexity
from .recording import NAME, Book, batches, recording_plugin

logger = logging.getLogger("pegboard")

#: Bytes of the statistics that are held at a time.
BUDGET: Final = 1 << 29
#: Share of the text that is held out: never calibrated with, and what perplexity is measured on.
HELD_OUT: Final = 0.2


class QuantizeReport(msgspec.Struct, frozen=True, kw_only=True):
    scheme: str
    method: str
    #: Linears that were written quantized, by their names in the checkpoint.
    quantized: int
    #: Bytes of the model's tensors, before and after.
    bytes_before: int
    bytes_after: int
    #: On the held-out part of the text; None without one.
    perplexity_before: float | None
    perplexity_after: float | None
    calibration_tokens: int
    #: Linears that none of these reached (experts), rounded to nearest.
    uncalibrated: int
    held_out_tokens: int


def quantize(
    model: str | Path,
    out: Path,
    *,
    scheme: str = "int4",
    method: str = "rtn",
    options: Mapping[str, Any] | None = None,
    calibration: Path | None = None,
    samples: int = 16,
    length: int = 512,
    device: str = "auto",
    say: Callable[[str], None] = logger.info,
) -> QuantizeReport:
    """Write `model` into the folder `out`, its linears rounded by the quantizer part `scheme` with `options`.

    `samples` texts of `length` tokens of the file `calibration` are read for statistics, as many as are left of its
    last fifth for perplexity. ConfigError for what can't be done, before anything is computed."""
    refuse_used(out)
    registry = Registry.discover()
    survey = Survey(load_config({"model": str(model), "device": device}), registry)
    try:
        writer, skip = _writer(registry, scheme, method, options or {}, survey.spec.linears)
        if writer.needs_statistics and calibration is None:
            raise ConfigError(f"method {method!r} needs a text to calibrate with: name a file")
        texts, held = _texts(survey, calibration, samples, length)
        specs = [spec for spec in survey.spec.linears if not skip(spec)]
        folding = Folding(specs, survey.checkpoint) if writer.folds else None
        before, unseen = None, 0
        tensors: dict[str, Tensor] = {}
        if held:
            book = Book()
            with Engine(**_settings(model, device, length), plugins=[recording_plugin(book)], quantizer=NAME) as engine:
                before = perplexity(engine, held)
                say(f"perplexity before: {before:.3f}")
                if writer.needs_statistics:
                    for run in batches([(spec.name, spec.in_features) for spec in specs], BUDGET):
                        statistics = _statistics(engine, book, run, texts)
                        unseen += len(run) - len(statistics)
                        for layer in _layers([spec for spec in specs if spec.name in run]):
                            seen = {spec.name: statistics.pop(spec.name) for spec in layer if spec.name in statistics}
                            tensors |= _quantized(survey, layer, writer, seen, folding)
                        say(f"calibrated up to {run[-1]}")
        if not writer.needs_statistics:
            for layer in _layers(specs):
                tensors |= _quantized(survey, layer, writer, {}, None)
        if unseen:
            say(f"{unseen} linears were given no token of the text: rounded to nearest; more text reaches more experts")
        written = {f"{source}.weight" for spec in specs for source in spec.sources}
        dense = {
            name: dense_tensor(survey.checkpoint, name) for name in survey.checkpoint.tensors() if name not in written
        }
        for name, weight in ({} if folding is None else folding.norms).items():
            dense[name] = weight.to(dense[name].dtype)
        skipped = [source for spec in survey.spec.linears if skip(spec) for source in spec.sources]
        skipped += ["lm_head"] if survey.spec.linears[-1].tied else []
        write_folder(out, survey.checkpoint, {**dense, **tensors}, writer.config(skipped))
        stored = sum(info.nbytes for info in survey.checkpoint.tensors().values())
    finally:
        survey.checkpoint.close()
    after = None
    if held:
        with Engine(**_settings(out, device, length)) as engine:
            after = perplexity(engine, held)
        say(f"perplexity after: {after:.3f}")
    return QuantizeReport(
        scheme=scheme,
        method=method,
        quantized=len(written),
        bytes_before=stored,
        bytes_after=sum(tensor.nbytes for tensor in (*dense.values(), *tensors.values())),
        perplexity_before=before,
        perplexity_after=after,
        calibration_tokens=sum(map(len, texts)) if writer.needs_statistics else 0,
        uncalibrated=unseen,
        held_out_tokens=sum(map(len, held)),
    )


def _settings(model: str | Path, device: str, length: int) -> dict[str, Any]:
    return {"model": model, "device": device, "max_length": length + 1, "max_rows": 4}


def _writer(
    registry: Registry, scheme: str, method: str, options: Mapping[str, Any], linears: Sequence[LinearSpec]
) -> tuple[WeightWriter, Callable[[LinearSpec], bool]]:
    entry = registry.get("quantizer", scheme)
    make = getattr(entry.load(), "writer", None)
    if make is None:
        able = [part.part.name for part in registry.parts("quantizer") if hasattr(part.load(), "writer")]
        raise ConfigError(f"quantizer {scheme!r} writes no checkpoints; those that do: {', '.join(able) or 'none'}")
    given = entry.options(dict(options))
    writer = make(method, given)
    if not isinstance(writer, WeightWriter):
        raise ConfigError(f"quantizer {scheme!r}: writer gave {writer!r}, must be a WeightWriter")
    skipped = tuple(getattr(given, "skip", ()))
    for module in skipped:
        if not any(_is_in(module, spec) for spec in linears):
            names = [name for spec in linears for name in (spec.name, *spec.sources)]
            parts = {part for name in names for part in (name, *name.split("."))}
            raise ConfigError(f"skip: this model has no linear {module!r}{nearest(module, parts)}")

    def skip(spec: LinearSpec) -> bool:
        """Named, a tied head, or a router, whose choices rounding would change."""
        router = spec.name.endswith((".mlp.gate", ".block_sparse_moe.gate"))
        return spec.tied or router or any(_is_in(module, spec) for module in skipped)

    return writer, skip


def _is_in(module: str, spec: LinearSpec) -> bool:
    """Whether it names the linear or a source of it, or what they are part of, by whole components."""
    return any(f".{module}." in f".{name}." for name in (spec.name, *spec.sources))


def _texts(survey: Survey, file: Path | None, samples: int, length: int) -> tuple[list[list[int]], list[list[int]]]:
    """(to calibrate with, held out): texts of `length` ids, spread over the file's first part, and of its last part."""
    if file is None:
        return [], []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text {file} can't be read: {error}") from error
    ids = load_tokenizer(survey.checkpoint.tokenizer).encode(text, add_special=False)
    cut = int(len(ids) * (1 - HELD_OUT))
    first, last = _pieces(ids[:cut], length, samples), _pieces(ids[cut:], length, samples)
    if not first or not last:
        need = int(length / HELD_OUT) + 1
        raise ConfigError(f"{file} has {len(ids)} tokens; texts of {length} need {need} at least: lower the length")
    return first, last


def _pieces(ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    whole = len(ids) // length
    chosen = sorted({index * whole // count for index in range(count)}) if whole else []
    return [list(ids[index * length : (index + 1) * length]) for index in chosen]


def _statistics(
    engine: Engine, book: Book, names: Sequence[str], texts: Sequence[Sequence[int]]
) -> dict[str, LinearStatistics]:
    """Of those that were given anything."""
    book.open(names)
    for output in engine.generate([list(text) for text in texts], SamplingParams(temperature=0.0, max_tokens=1)):
        output.raise_for_error()
    found = {name: book.close(name) for name in names}
    book.open(())
    return {name: seen for name, seen in found.items() if seen is not None}


def _layers(specs: Sequence[LinearSpec]) -> list[list[LinearSpec]]:
    """Neighbours of one layer: scales move within it, and its float32 weights are held at a time."""
    runs = groupby(specs, key=lambda spec: spec.name.split(".")[:3])
    return [list(layer) for _, layer in runs]


def _quantized(
    survey: Survey,
    specs: Sequence[LinearSpec],
    writer: WeightWriter,
    statistics: Mapping[str, LinearStatistics],
    folding: Folding | None,
) -> dict[str, Tensor]:
    """The stored tensors of these linears."""
    weights = {spec.name: _weight(survey, spec) for spec in specs}
    if folding is not None:
        for name in statistics:
            folding.fold(name, weights, partial(writer.scales, statistics=statistics[name]))
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        for source, weight in zip(spec.sources, weights[spec.name].split_with_sizes(spec.out_features), strict=True):
            made = writer.tensors(weight, statistics.get(spec.name))
            tensors |= {f"{source}.{suffix}": tensor for suffix, tensor in made.items()}
    return tensors


def _weight(survey: Survey, spec: LinearSpec) -> Tensor:
    """[O, I] float32, the caller's."""
    return torch.cat([survey.checkpoint.read(f"{source}.weight", dtype="float32") for source in spec.sources]).clone()
