"""Config + registry -> AssemblyPlan (serializable) -> the parts of an engine.

Every refusal is collected and raised at once, before a weight is read. An executor elsewhere rebuilds exactly the
same parts from the plan's bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from .admission import Admission
from .config import EngineConfig, PartChoice, load_config, unknown_allowed
from .contracts.attention import AttentionLayer, AttentionNeed, KVLayout
from .contracts.cache import CacheGroup, CacheManager, CacheNeed
from .contracts.checkpoint import Checkpoint, CheckpointNeed
from .contracts.device import DeviceFacts
from .contracts.executor import Executor, ExecutorNeed
from .contracts.model import ModelNeed, ModelSpec
from .contracts.quantizer import Shard
from .contracts.scheduler import Scheduler
from .devices import device_facts
from .dtypes import element_bytes
from .errors import CheckpointError, ConfigError, PluginError
from .hub import resolve_model
from .memory import MemoryPlan, affordable_length, gib, plan_memory
from .needs import Needs, architecture, choose_dtype, choose_length, derive_needs, eos_ids, page_sizes, scheme_name
from .pairing import Backend, make_groups
from .portable import import_objects, locate_objects
from .registry.lock import lock_problems
from .registry.observers import Observers
from .registry.parts import RegisteredPart
from .registry.registry import Registry
from .registry.resolution import Decision, resolve, winner
from .text import Tokenizer, has_tokenizer, load_tokenizer, no_tokenizer

logger = logging.getLogger("pegboard")


class ChosenPart(msgspec.Struct, frozen=True, kw_only=True):
    """A winner, by what a registry elsewhere needs to find the same one."""

    name: str
    plugin: str
    distribution: str | None
    version: str | None
    options: dict[str, Any] = {}


class AssemblyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided. `msgspec.json` encodes and decodes it."""

    config: dict[str, Any]
    #: File or folder.
    model: str
    device: DeviceFacts
    dtype: str
    #: By the config's field: attention, decode_attention, cache, ..., and model, checkpoint.
    parts: dict[str, ChosenPart]
    groups: tuple[CacheGroup, ...]
    #: Pages to allocate a group.
    pages: tuple[int, ...]
    #: Entries a page.
    page_size: int
    max_length: int
    #: What max_length would be if the cache were large enough.
    wanted_length: int
    #: Longest sequence that the whole cache holds.
    capacity: int
    #: Ids from here on are never chosen.
    vocab_limit: int
    #: Steps that may run ahead of the host.
    depth: int
    memory: MemoryPlan
    #: Plugin objects that were passed to the engine, as "module" or "module:attribute".
    objects: tuple[str, ...] = ()
    #: Why the plan can't be rebuilt in another process; empty: it can.
    unportable: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """For another process. ConfigError when a plugin object can't be imported there."""
        if self.unportable:
            raise ConfigError("the plan can't be rebuilt in another process", self.unportable)
        return msgspec.json.encode(self)


class Selection:
    """The winners of a plan, each with its validated options. Rebuilt wherever the plan goes."""

    def __init__(self, registry: Registry, parts: Mapping[str, ChosenPart]) -> None:
        self._registry = registry
        self._parts = parts

    def factory(self, where: str) -> Any:
        return self._entry(where).load()

    def options(self, where: str) -> Any:
        return self._entry(where).options(self._parts[where].options, f"{where}.options")

    def create(self, where: str, need: Any, **extra: Any) -> Any:
        return self._entry(where).create(need, self.options(where), **extra)

    def ask(self, where: str, method: str, *arguments: Any) -> Any:
        """Call a class method of a winner that describes something."""
        entry = self._entry(where)
        with entry.blamed(method):
            return getattr(entry.load(), method)(*arguments)

    def layouts(self, where: str, need: AttentionNeed, layer: AttentionLayer) -> Sequence[KVLayout]:
        """What an attention backend reads for a layer, best first."""
        found: Sequence[KVLayout] = self.ask(where, "layouts", need, layer, self.options(where))
        if not isinstance(found, list | tuple) or not all(isinstance(layout, KVLayout) for layout in found):
            source = self._entry(where).source
            raise PluginError(f"{where} of {source}: layouts returned {found!r}, not a list of KVLayout")
        return found

    def _entry(self, where: str) -> RegisteredPart:
        part = self._parts[where]
        return self._registry.exactly(_role(where), part.name, part.plugin, part.distribution)


def _role(where: str) -> str:
    if where.startswith("observers"):
        return "observer"
    where = where.removeprefix("shadow.")
    return "attention" if where == "decode_attention" else where


class Survey:
    """Config, checkpoint, model and device put together: what every part must serve."""

    def __init__(self, config: EngineConfig, registry: Registry, plan: AssemblyPlan | None = None) -> None:
        """With `plan`, everything is as it was decided there, and nothing is decided again."""
        self.config = config
        self.registry = registry
        self.device = device_facts(config.device) if plan is None else plan.device
        self.path = resolve_model(config.model) if plan is None else Path(plan.model)
        self.decisions: list[Decision] = []
        self.parts: dict[str, ChosenPart] = {} if plan is None else dict(plan.parts)
        self.checkpoint = self._open()
        try:
            self.shard = Shard(size=self._shards())
            self.spec = self._describe()
            self.dtype = choose_dtype(config.dtype, self.checkpoint, self.device) if plan is None else plan.dtype
            longest, self.problems = choose_length(config, self.spec)
            sizes = page_sizes(config, self.device) if plan is None else (plan.page_size,)
            self._settle_page_size(sizes, longest if plan is None else plan.max_length)
        except BaseException:
            self.checkpoint.close()
            raise

    @classmethod
    def of_plan(cls, plan: AssemblyPlan, registry: Registry) -> Self:
        return cls(EngineConfig.model_validate(plan.config), registry, plan)

    def limit_length(self, longest: int) -> None:
        """Set what every part must serve for sequences of at most `longest` tokens."""
        self.max_length = longest
        self.needs = derive_needs(
            self.config, self.checkpoint, self.spec, self.device, self.dtype, longest, self.page_size
        )

    def _settle_page_size(self, sizes: Sequence[int], longest: int) -> None:
        """The first size that attention serves, or the last."""
        for size in sizes:
            self.page_size = size
            self.limit_length(longest)
            if size == sizes[-1] or all(
                self._resolve(where, choice, need).winner is not None for where, choice, need in self._attention()
            ):
                return

    def _attention(self) -> tuple[tuple[str, PartChoice, AttentionNeed], ...]:
        config, needs = self.config, self.needs
        decode = config.decode_attention or config.attention
        return (("attention", config.attention, needs.prefill), ("decode_attention", decode, needs.decode))

    def decide(
        self, where: str, choice: PartChoice, need: Any, *, key: str | None = None, static: bool | None = None
    ) -> Decision:
        """Resolve one choice; the winner is remembered, the decision kept for the report."""
        decision = self._resolve(where, choice, need, key=key, static=static)
        if decision.winner is not None:
            entry = winner(self.registry, decision)
            self.parts[where] = ChosenPart(
                name=decision.winner,
                plugin=entry.plugin,
                distribution=entry.distribution,
                version=entry.version,
                options=dict(choice.options),
            )
            decision = replace(decision, notes=self._notes(entry))
        self.decisions.append(decision)
        return decision

    def _notes(self, entry: RegisteredPart) -> tuple[str, ...]:
        recorded = self.device.type == "cuda" and self.config.cuda_graphs
        if recorded and entry.part.role in ("attention", "ops", "sampler") and not entry.load().capturable:
            return ("it can't be recorded in a CUDA graph: its kernels are launched one by one in every step",)
        return ()

    def note(self, where: str, notes: Sequence[str]) -> None:
        """Add what a part that was made says of itself to the report."""
        self.decisions = [
            replace(decision, notes=(*decision.notes, *notes)) if decision.where == where else decision
            for decision in self.decisions
        ]

    def _resolve(
        self, where: str, choice: PartChoice, need: Any, *, key: str | None = None, static: bool | None = None
    ) -> Decision:
        return resolve(
            self.registry,
            _role(where),
            choice,
            need,
            device_type=self.device.type,
            objective=self.config.objective,
            allow=self.config.plugins.allow,
            key=key,
            where=where,
            static=static,
        )

    def decide_all(self) -> list[str]:
        """Every role whose need is known before the cache's layout is; returns all refusals."""
        config, needs = self.config, self.needs
        made = [
            *(self.decide(*asked) for asked in self._attention()),
            self.decide("scheduler", config.scheduler, needs.scheduler),
            self.decide("sampler", config.sampler, needs.sampler),
            self.decide("quantizer", config.quantizer, needs.quantizer, key=scheme_name(self.checkpoint)),
            self.decide("ops", config.ops, needs.ops),
        ]
        made += [decision for decision in self.decisions if decision.where == "executor"]
        if config.speculator is not None:
            made.append(self.decide("speculator", config.speculator, None))
        for index, choice in enumerate(config.observers):
            made.append(self.decide(f"observers[{index}]", choice, None, static=False))
        made += self._decide_references()
        problems = [*self.problems, *unknown_allowed(self.config, self.registry), *self._shadow_problems()]
        return problems + [reason for decision in made for reason in decision.reasons]

    @property
    def reference_needs(self) -> dict[str, Any]:
        """Where a shadowed part's reference stands in the plan -> what it must serve. It need not be independent of a
        row's neighbours: that is for what is used."""
        shadow = self.config.shadow
        if shadow is None:
            return {}
        needs: dict[str, dict[str, Any]] = {
            "attention": {"attention": self.needs.prefill, "decode_attention": self.needs.decode},
            "ops": {"ops": self.needs.ops},
            "sampler": {"sampler": self.needs.sampler},
        }
        return {
            f"shadow.{where}": replace(need, batch_invariant=False)
            for role in shadow.references()
            for where, need in needs[role].items()
        }

    def _decide_references(self) -> list[Decision]:
        shadow = self.config.shadow
        choices = {} if shadow is None else shadow.references()
        return [self.decide(where, choices[_role(where)], need) for where, need in self.reference_needs.items()]

    def _shadow_problems(self) -> list[str]:
        if self.config.shadow is None or "executor" not in self.parts:
            return []
        if self.selection.factory("executor").shadows:
            return []
        return [f"executor = {self.parts['executor'].name!r} does not run parts beside others: leave `shadow` out"]

    @property
    def selection(self) -> Selection:
        return Selection(self.registry, self.parts)

    def _open(self) -> Checkpoint:
        if "checkpoint" not in self.parts:
            self.decide("checkpoint", PartChoice(), CheckpointNeed(path=self.path))
        if "checkpoint" not in self.parts:
            kinds = sorted(key for part in self.registry.parts("checkpoint") for key in part.part.matches)
            raise CheckpointError(f"{self.path} is of no known format; known: {', '.join(kinds)}")
        checkpoint: Checkpoint = self.selection.ask("checkpoint", "open", self.path)
        return checkpoint

    @property
    def executor_need(self) -> ExecutorNeed:
        return ExecutorNeed(device=self.device, speculates=self.config.speculator is not None)

    def _shards(self) -> int:
        """Decided first: it sets what one rank holds. An executor that is refused counts as one rank until then."""
        if "executor" not in self.parts:
            self.decide("executor", self.config.executor, self.executor_need)
        if "executor" not in self.parts:
            return 1
        selection = self.selection
        return int(selection.ask("executor", "shards", self.executor_need, selection.options("executor")))

    def _describe(self) -> ModelSpec:
        name = architecture(self.checkpoint)
        need = ModelNeed(config=self.checkpoint.config, device=self.device, shard_size=self.shard.size)
        if "model" not in self.parts:
            found = self.decide("model", PartChoice(), need, key=name)
        if "model" not in self.parts:
            known = sorted(key for part in self.registry.parts("model") for key in part.part.matches)
            reasons = found.reasons if name in known else [f"supported architectures: {', '.join(known)}"]
            raise ConfigError(f"the model in {self.path} ({name}) can't run", reasons)
        spec = self.selection.ask("model", "describe", need)
        if not isinstance(spec, ModelSpec):
            raise PluginError(
                f"model {self.parts['model'].name!r}: describe returned {type(spec).__name__}, no ModelSpec"
            )
        return spec


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
        sampler = Selection(self.registry, self.plan.parts).factory("sampler")
        return Admission(
            tokenizer=self.tokenizer,
            no_tokenizer=self.no_tokenizer,
            vocab_size=self.plan.vocab_limit,
            eos_ids=self.eos_ids,
            max_length=self.plan.max_length,
            wanted_length=self.plan.wanted_length,
            capacity=self.plan.capacity,
            max_queue=config.max_queue,
            needs_host_token=bool(sampler.needs_host_token),
        )


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
    held = [
        spec
        for where, need in (("attention", needs.prefill), ("decode_attention", needs.decode))
        for spec in selection.create(where, need).workspace()
    ]
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
        sum(math.prod(spec.shape) * element_bytes(spec.dtype) for spec in held),
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
    tokenizer, advice = _tokenizer(survey.checkpoint)
    limit = spec.vocab_size if tokenizer is None else min(spec.vocab_size, tokenizer.vocab_size)
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
        eos_ids=_eos_ids(survey.checkpoint, tokenizer, limit),
    )


def unread_by_references(survey: Survey, groups: Sequence[CacheGroup]) -> list[str]:
    """Why shadow mode's parts can't work on the cache of the others."""
    selection, problems = survey.selection, []
    for where, need in survey.reference_needs.items():
        role, name = _role(where), survey.parts[where].name
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
        entry = registry.exactly(_role(where), part.name, part.plugin, part.distribution)
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


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """(tokenizer, ""), or (None, what to do): a model without one that is read takes prompts of token ids."""
    files = checkpoint.tokenizer
    return (load_tokenizer(files), "") if has_tokenizer(files) else (None, no_tokenizer(files))


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    named = eos_ids(checkpoint, vocab_size)
    if named is None and tokenizer is not None and tokenizer.eos_id is not None:
        return frozenset([tokenizer.eos_id])
    return named or frozenset()
