"""Config + registry -> AssemblyPlan (serializable) -> the parts of an engine.

Every refusal is collected and raised at once, before a weight is read. An executor elsewhere rebuilds exactly the
same parts from the plan's bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .admission import Admission
from .beams.scheduler import BeamScheduler
from .config import EngineConfig, load_config
from .contracts.attention import AttentionLayer
from .contracts.cache import CacheGroup, CacheManager, CacheNeed
from .contracts.executor import Executor, ExecutorNeed
from .contracts.processor import LogitsProcessor
from .contracts.scheduler import Scheduler
from .errors import ConfigError, PluginError
from .memory import affordable_length, gib, plan_memory
from .needs import (
    Needs,
)
from .pairing import Backend, make_groups
from .plan import AssemblyPlan
from .portable import import_objects, locate_objects
from .registry.lock import lock_problems
from .registry.observers import Observers
from .registry.registry import Registry
from .registry.resolution import Decision
from .selection import Selection, role_of
from .survey import Survey, eos_ids_of, read_tokenizer, vocab_limit
from .text import Tokenizer

logger = logging.getLogger("pegboard")


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, why it is so, and the host parts that were needed to make it."""

    plan: AssemblyPlan
    decisions: tuple[Decision, ...]
    registry: Registry
    cache: CacheManager
    needs: Needs
    executor_need: ExecutorNeed
    tokenizer: Tokenizer | None
    #: Why there is none and what to do; "" when there is one.
    no_tokenizer: str
    eos_ids: frozenset[int]
    #: By name; these check what requests ask of them.
    processors: Mapping[str, LogitsProcessor]

    def build(
        self,
        clock: Callable[[], float],
        progress: Callable[[int, int], None] | None = None,
        watchers: Sequence[object] = (),
    ) -> tuple[Scheduler, Executor, Observers]:
        """Create the parts that run; the executor loads the weights. `watchers` are more observers."""
        plan, selection = self.plan, Selection(self.registry, self.plan.parts)
        names = [where for where in plan.parts if where.startswith("observers")]
        observers = Observers([*(selection.create(where, None) for where in names), *watchers])
        scheduler: Scheduler = selection.create("scheduler", self.needs.scheduler, cache=self.cache, clock=clock)
        if scheduler.host_chooses:
            scheduler = BeamScheduler(scheduler)
        executor: Executor = selection.create(
            "executor",
            self.executor_need,
            plan=plan.encode,
            restore=lambda: (plan, self.registry),
            progress=progress,
        )
        return scheduler, executor, observers

    def admission(self) -> Admission:
        config = EngineConfig.model_validate(self.plan.config)
        selection = Selection(self.registry, self.plan.parts)
        return Admission(
            tokenizer=self.tokenizer,
            no_tokenizer=self.no_tokenizer,
            vocab_size=self.plan.vocab_limit,
            eos_ids=self.eos_ids,
            max_length=self.plan.max_length,
            wanted_length=self.plan.wanted_length,
            capacity=self.plan.capacity,
            max_queue=config.max_queue,
            needs_host_token=bool(selection.factory("sampler").needs_host_token) or self._speculates_on_host(),
            max_drafts=self.needs.sampler.max_drafts,
            processors=self.processors,
            max_beams=config.max_rows if selection.factory("scheduler").host_chooses else 0,
        )

    def _speculates_on_host(self) -> bool:
        if "speculator" not in self.plan.parts:
            return False
        return bool(Selection(self.registry, self.plan.parts).factory("speculator").needs_host_token)


def assemble(config: EngineConfig, registry: Registry, objects: Sequence[object] = ()) -> Assembled:
    """Decide everything, load nothing. `objects` are the plugins that were passed to the engine, for the plan.

    ConfigError with every refusal; CheckpointError; PluginError for an object that is broken.
    """
    _refuse_broken_objects(registry)
    _refuse_unlocked(config, registry)
    survey = Survey(config, registry)
    try:
        return _assemble(survey, objects)
    finally:
        survey.checkpoint.close()


def _assemble(survey: Survey, objects: Sequence[object]) -> Assembled:
    config, needs, spec = survey.config, survey.needs, survey.spec
    reasons = survey.decide_all()
    if reasons:
        reasons += survey.decide("cache", config.cache, None).reasons
        raise ConfigError("the config can't work", reasons)
    selection = survey.selection
    ops = selection.create("ops", needs.ops)
    prefill, decode = (
        Backend(
            getattr(selection.factory(where), "__name__", survey.parts[where].name),
            partial(selection.layouts, where, need),
        )
        for where, need in (("attention", needs.prefill), ("decode_attention", needs.decode))
    )
    groups = make_groups(spec.layers, prefill, decode, ops)
    unread = unread_by_references(survey, groups)
    if unread:
        raise ConfigError("the config can't work", unread)
    quantizer = selection.create("quantizer", needs.quantizer)
    survey.note("quantizer", quantizer.notes())
    stored = survey.checkpoint.tensors()
    memory = plan_memory(
        config,
        survey.device,
        spec,
        quantizer,
        stored,
        survey.shard,
        groups,
        survey.dtype,
        survey.max_length,
        survey.page_size,
        needs.scheduler.max_step_tokens,
        survey.speculation,
    )
    affordable = affordable_length(groups, survey.page_size, memory.kv_cache)
    if config.max_length is None and 0 < affordable < survey.max_length:
        logger.warning(
            "max_length is %d: the KV cache of %s holds no sequence of the %d tokens that the model was made for",
            affordable,
            gib(memory.kv_cache),
            survey.max_length,
        )
        survey.limit_length(affordable)
        needs = survey.needs
    cache_need = CacheNeed(
        groups=groups,
        page_size=survey.page_size,
        budget_bytes=memory.kv_cache,
        max_rows=config.max_rows,
        max_length=survey.max_length,
        max_query=needs.decode.max_query,
    )
    refused = survey.decide("cache", config.cache, cache_need).reasons
    if refused:
        raise ConfigError("the config can't work", refused)
    if survey.selection.factory("cache").needs_score_mass and not needs.prefill.score_mass:
        named = survey.parts["cache"].name
        raise ConfigError(f"cache = {named!r} evicts by score mass, which is not reported yet: choose another")
    cache: CacheManager = survey.selection.create("cache", cache_need)
    tokenizer, advice = read_tokenizer(survey.checkpoint)
    limit = vocab_limit(spec, tokenizer)
    paths, unportable = locate_objects(objects)
    plan = AssemblyPlan(
        config=config.model_dump(mode="json", exclude_none=True),
        model=str(survey.path),
        device=survey.device,
        dtype=survey.dtype,
        parts=survey.parts,
        groups=groups,
        pages=cache.pages,
        page_size=survey.page_size,
        max_length=survey.max_length,
        wanted_length=config.max_length or spec.context_length,
        capacity=_capacity(cache, survey.max_length),
        vocab_limit=limit,
        depth=needs.scheduler.depth,
        memory=memory,
        objects=paths,
        unportable=unportable,
    )
    return Assembled(
        plan=plan,
        decisions=tuple(survey.decisions),
        registry=survey.registry,
        cache=cache,
        needs=needs,
        executor_need=survey.executor_need,
        tokenizer=tokenizer,
        no_tokenizer=advice,
        eos_ids=eos_ids_of(survey.checkpoint, tokenizer, limit),
        processors=survey.make_processors(),
    )


def unread_by_references(survey: Survey, groups: Sequence[CacheGroup]) -> list[str]:
    """Why shadow mode's parts can't work on the cache of the others."""
    selection, problems = survey.selection, []
    for where, need in survey.reference_needs.items():
        role, name = role_of(where), survey.parts[where].name
        for group in groups:
            if group.kind == "state" or role == "sampler":
                continue
            if role == "ops":
                known = selection.create(where, need).writes(group.layout)
            else:
                layer = survey.spec.layers[group.layers[0]]
                assert isinstance(layer, AttentionLayer)  # groups of other layers are of kind "state"
                known = group.layout in selection.layouts(where, need, layer)
            if not known:
                problems.append(f"{where} = {name!r} does not know the KV layout {group.layout.name} of the others")
    if survey.config.shadow and survey.config.shadow.attention and survey.needs.prefill.score_mass:
        problems.append("shadow.attention: the attention adds up score mass in the cache, which may be done only once")
    return list(dict.fromkeys(problems))


def plan_engine(
    model: str | Path | None = None,
    *,
    config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> AssemblyPlan:
    """What `Engine` with these arguments would be and need (`plan.memory`); loads no weight. Raises as Engine does."""
    return assemble(engine_config(model, config, settings), Registry.discover()).plan


def engine_config(
    model: str | Path | None, config: EngineConfig | Mapping[str, Any] | str | Path | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """`model` and `settings` over `config`."""
    chosen = settings if model is None else {"model": str(model), **settings}
    return load_config({} if config is None else config, chosen)


def explain(config: EngineConfig, registry: Registry) -> list[Decision]:
    """Every decision for this config and its model, with those that could not be made; loads no weight."""
    survey = Survey(config, registry)
    try:
        _assemble(survey, ())
    except ConfigError:
        if all(decision.winner is not None for decision in survey.decisions):
            raise  # not a matter of parts: memory, or layouts
    finally:
        survey.checkpoint.close()
    return survey.decisions


def restore(data: bytes) -> tuple[AssemblyPlan, Registry]:
    """A plan from `AssemblyPlan.encode` and a registry of this process that holds the same parts.

    PluginError: a part is not here, or of another version. ConfigError: the plan's config has a lock, and what is
    installed here is something else."""
    plan = msgspec.json.decode(data, type=AssemblyPlan)
    registry = Registry.discover(import_objects(plan.objects))
    _refuse_unlocked(EngineConfig.model_validate(plan.config), registry)
    for where, part in plan.parts.items():
        entry = registry.exactly(role_of(where), part.name, part.plugin, part.distribution)
        if entry.version != part.version:
            raise PluginError(
                f"the plan was made with {where} {part.name!r} of {part.distribution} {part.version}, but here it is "
                f"{entry.version}: install the same version"
            )
    return plan, registry


def _refuse_broken_objects(registry: Registry) -> None:
    broken = registry.broken_objects
    if broken:
        raise PluginError("; ".join(f"{plugin.source} is broken: {plugin.reason}" for plugin in broken))


def _refuse_unlocked(config: EngineConfig, registry: Registry) -> None:
    problems = lock_problems(config, registry)
    if problems:
        raise ConfigError("the installed plugins are not those that were locked", problems)


def _capacity(cache: CacheManager, longest: int) -> int:
    """The longest sequence that the whole cache holds: the last length that fits."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache.fits(middle) else (low, middle - 1)
    return low
