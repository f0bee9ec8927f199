"""Heads trained on their target's own texts: collected by an engine, learnt with AdamW, measured by an engine that
drafts with them before and after."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import torch

from ..assembly import assemble
from ..config import load_config
from ..contracts.sampler import SamplingParams
from ..contracts.speculator import HeadText, HeadTrainer, HeadTraining, Speculator
from ..devices import torch_device
from ..engine import Engine
from ..errors import ConfigError
from ..quantizing.folder import make_folder, refuse_used, write_tensors
from ..registry.registry import Registry
from ..request import Request
from ..survey import Survey, read_tokenizer
from .attention import text_attention
from .collecting import NAME, Collected, collecting_plugin
from .prompts import built_in, encode, read_lines, read_pieces
from .records import Acceptance, HeadsReport, HeadsSettings

logger = logging.getLogger("pegboard")

_EMBEDDING: Final = "model.embed_tokens.weight"
#: One prompt in so many is held out, and at most so many of them.
_HELD_OUT, _MOST_HELD_OUT = 8, 16
#: Of texts after the first round of prompts, which is greedy.
_TEMPERATURE: Final = 0.8
#: Share of the steps in which the learning rate rises.
_WARM_UP: Final = 0.05
_LARGEST_GRADIENT: Final = 1.0
#: Of the engine that answers prompts: a step of many costs a GPU little more than one of few.
_ROWS: Final = {"cpu": 16, "cuda": 256}


def train_heads(
    model: str | Path,
    out: str | Path,
    *,
    kind: str,
    prompts: Path | None = None,
    text: Path | None = None,
    settings: HeadsSettings | None = None,
    device: str = "auto",
    say: Callable[[str], None] = logger.info,
) -> HeadsReport:
    """Write into the folder `out` what the speculator part `kind` loads beside `model`.

    The target answers `prompts` (a file of one a line; without one, prompts that are built in), the first round
    greedily; or it reads `text`. ConfigError for what can't be done, before anything is computed. A training that is
    broken off leaves `out` empty."""
    settings, out = settings or HeadsSettings(), Path(out)
    refuse_used(out)
    if prompts is not None and text is not None:
        raise ConfigError("prompts and text are two ways to say what is learnt from: name one of them")
    registry = Registry.discover()
    speculator = _speculator(registry, kind)
    plan = assemble(load_config({"model": str(model), "device": device}), registry).plan
    survey = Survey.of_plan(plan, registry)
    try:
        learnt, held = _prompts(survey, prompts, text, settings)
        where = torch_device(survey.device)
        trainer = _trainer(survey, speculator, settings, where)
    finally:
        survey.checkpoint.close()
    make_folder(out)
    reach = max(_longest(learnt) + (settings.tokens if text is None else 1), _longest(held) + settings.tokens)
    common = {"model": model, "device": device, "max_length": reach}
    say(f"collecting {settings.texts if text is None else len(learnt)} texts")
    texts = _collect(common, learnt, settings, generates=text is None, device=where)
    found = sum(len(part.greedy) for part in texts)
    if not texts:
        raise ConfigError(f"no text has {settings.drafts + 2} tokens: ask for more `tokens`, or fewer `drafts`")
    with tempfile.TemporaryDirectory(prefix="pegboard-heads-") as folder:
        _write(Path(folder), trainer, {})
        before = _measure(common, Path(folder), kind, held, settings)
        say(f"{found} tokens; before: {_line(before)}")
        losses = _train(trainer, texts, settings, say)
        _write(Path(folder), trainer, {})
        after = _measure(common, Path(folder), kind, held, settings)
        say(f"after: {_line(after)}")
        written = (Path(folder) / "model.safetensors").stat().st_size
    tenth = max(1, len(losses) // 10)
    report = HeadsReport(
        kind=kind,
        parameters=sum(part.numel() for part in trainer.parameters),
        tokens_learnt=found,
        steps=len(losses),
        first_loss=sum(losses[:tenth]) / tenth,
        last_loss=sum(losses[-tenth:]) / tenth,
        held_out_prompts=len(held),
        before=before,
        after=after,
        bytes_written=written,
    )
    _write(out, trainer, {"training": {**msgspec.to_builtins(settings), **msgspec.to_builtins(report)}})
    return report


def _speculator(registry: Registry, kind: str) -> type[Speculator]:
    def trains(factory: Any) -> bool:
        return getattr(factory, "trainer", None) is not None and (
            factory.trainer.__func__ is not Speculator.trainer.__func__  # type: ignore[attr-defined]
        )

    able = {part.part.name: part.load() for part in registry.parts("speculator") if trains(part.load())}
    if kind not in able:
        raise ConfigError(
            f"no speculator {kind!r} has heads to train; those that do: {', '.join(sorted(able)) or 'none'}"
        )
    found: type[Speculator] = able[kind]
    return found


def _trainer(survey: Survey, speculator: type[Speculator], settings: HeadsSettings, device: str) -> HeadTrainer:
    spec, checkpoint = survey.spec, survey.checkpoint
    if not survey.selection.factory("model").shares_ends:
        raise ConfigError(f"{spec.architecture} shares neither embedding nor head: it can't have heads")
    head = f"{spec.linears[-1].sources[0]}.weight"
    missing = [name for name in (_EMBEDDING, head) if name not in checkpoint.tensors()]
    if missing:
        raise ConfigError(
            f"{survey.path} lacks {', '.join(missing)}: heads learn through an embedding and an output matrix that are "
            "dense or in GGUF blocks"
        )
    matrix = checkpoint.read(head, dtype="float32", device=device)
    return speculator.trainer(
        HeadTraining(
            target=spec,
            config=checkpoint.config,
            embedding=matrix if head == _EMBEDDING else checkpoint.read(_EMBEDDING, dtype="float32", device=device),
            head=matrix,
            attention=text_attention(survey.selection, survey.device),
            drafts=settings.drafts,
            seed=settings.seed,
        )
    )


def _prompts(
    survey: Survey, prompts: Path | None, text: Path | None, settings: HeadsSettings
) -> tuple[list[list[int]], list[list[int]]]:
    """(to learn from, held out), ids of each."""
    tokenizer, why = read_tokenizer(survey.checkpoint)
    if tokenizer is None:
        raise ConfigError(f"heads are trained on texts: {why}")
    context = survey.max_length
    _refuse_lengths(settings, context, reads=text is not None)
    if text is not None:
        found = read_pieces(text, tokenizer, settings.length)
    else:
        found = encode(built_in() if prompts is None else read_lines(prompts), tokenizer)
    longest = context - (settings.tokens if text is None else 1)
    found = [prompt for prompt in found if 0 < len(prompt) <= longest]
    held = found[_HELD_OUT - 1 :: _HELD_OUT][:_MOST_HELD_OUT] or found[-1:]
    learnt = [prompt for prompt in found if prompt not in held]
    if not learnt:
        raise ConfigError(
            f"two different prompts of at most {longest} tokens are needed, one of them to measure with: "
            f"there are {len(found)}"
        )
    if text is None:
        return learnt, held
    half = max(1, min(settings.length // 2, context - settings.tokens))
    return learnt[: settings.texts], [prompt[:half] for prompt in held]


def _refuse_lengths(settings: HeadsSettings, context: int, *, reads: bool) -> None:
    if settings.tokens >= context:
        raise ConfigError(f"tokens is {settings.tokens}: a prompt and so many do not fit into a context of {context}")
    if reads and not settings.drafts + 2 <= settings.length < context:
        raise ConfigError(
            f"length is {settings.length}; with {settings.drafts} drafts and a context of {context} tokens pieces have "
            f"{settings.drafts + 2} to {context - 1}"
        )


def _longest(prompts: Sequence[Sequence[int]]) -> int:
    return max(map(len, prompts))


def _collect(
    common: Mapping[str, Any], prompts: Sequence[list[int]], settings: HeadsSettings, *, generates: bool, device: str
) -> list[HeadText]:
    """What the target gives after each prompt, and what it makes of the prompt itself; or of the prompt alone."""
    count = settings.texts if generates else len(prompts)
    collected = Collected()
    asked = [
        Request(
            prompt=prompts[place % len(prompts)],
            sampling=SamplingParams(
                temperature=0.0 if place < len(prompts) else _TEMPERATURE,
                seed=settings.seed + place,
                max_tokens=settings.tokens if generates else 1,
            ),
        )
        for place in range(count)
    ]
    rows = _ROWS[torch.device(device).type]
    with Engine(**common, max_rows=rows, plugins=[collecting_plugin(collected)], speculator=NAME) as engine:
        # All rows at once: steps with prompts among them are not recorded
        for first in range(0, count, rows):
            for output in engine.generate(asked[first : first + rows]):
                output.raise_for_error()
    return collected.texts(settings.drafts + 2, device)


def _measure(
    common: Mapping[str, Any], heads: Path, kind: str, prompts: Sequence[list[int]], settings: HeadsSettings
) -> Acceptance:
    sampling = SamplingParams(temperature=0.0, max_tokens=settings.tokens)
    speculator = {"use": kind, "options": {"model": str(heads), "drafts": settings.drafts}}
    with Engine(**common, max_rows=4, speculator=speculator, adapt_drafts=False) as engine:
        for output in engine.generate(list(prompts), sampling):
            output.raise_for_error()
        found = engine.stats().speculation
    if found is None or found.mean_length is None:
        return Acceptance(by_place=(), mean_length=1.0)  # every answer ended at once
    return Acceptance(by_place=tuple(round(share, 4) for share in found.acceptance), mean_length=found.mean_length)


def _train(
    trainer: HeadTrainer, texts: Sequence[HeadText], settings: HeadsSettings, say: Callable[[str], None]
) -> list[float]:
    """The losses of all steps."""
    optimiser = torch.optim.AdamW(trainer.parameters, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    each = math.ceil(len(texts) / settings.batch)
    steps, random = settings.epochs * each, Random(settings.seed)
    losses: list[float] = []
    order = list(texts)
    for epoch in range(settings.epochs):
        random.shuffle(order)
        for first in range(0, len(order), settings.batch):
            done = len(losses) / steps
            factor = min(1.0, (done + 1 / steps) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimiser.param_groups:
                group["lr"] = settings.rate * factor
            loss = trainer.loss(order[first : first + settings.batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trainer.parameters, _LARGEST_GRADIENT)
            optimiser.step()
            losses.append(float(loss.detach()))
        say(f"epoch {epoch + 1} of {settings.epochs}: loss {sum(losses[-each:]) / each:.4f}")
    return losses


def _write(out: Path, trainer: HeadTrainer, more: Mapping[str, Any]) -> None:
    weights = {name: part.detach().to("cpu", torch.bfloat16) for name, part in trainer.weights().items()}
    write_tensors(out / "model.safetensors", weights)
    text = json.dumps({**trainer.config, **more}, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def _line(found: Acceptance) -> str:
    shares = " ".join(f"{share:.2f}" for share in found.by_place)
    return f"{found.mean_length:.2f} tokens a step, accepted by place: {shares or '-'}"
