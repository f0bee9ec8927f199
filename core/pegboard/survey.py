"""All about a config and its model that is known before a part is made: what parts must serve, and who does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import replace
from pydantic import BaseModel

from .config import EngineConfig, PartChoice, unknown_allowed
from .contracts.attention import AttentionNeed
from .contracts.checkpoint import Checkpoint, CheckpointNeed
from .contracts.executor import ExecutorNeed
from .contracts.model import ModelNeed, ModelSpec
from .contracts.processor import LogitsProcessor, ProcessorNeed
from .contracts.quantizer import Shard
from .contracts.speculator import SpeculatorNeed, SpeculatorSpec
from .counts import count_problems
from .devices import device_facts
from .errors import CheckpointError, ConfigError, PluginError
from .hub import resolve_model
from .needs import (
    architecture,
    choose_dtype,
    choose_length,
    choose_step_tokens,
    derive_needs,
    eos_ids,
    page_sizes,
    scheme_name,
)
from .plan import AssemblyPlan, ChosenPart
from .registry.parts import RegisteredPart
from .registry.registry import Registry
from .registry.resolution import Decision, resolve, winner
from .selection import Selection, role_of
from .text import Tokenizer, has_tokenizer, load_tokenizer, no_tokenizer

_HIDDEN: Final = ("none", "kept", "all")
#: With the last token their ancestors are bits of 63.
_MOST_IN_TREE = 62


def _spec_problems(spec: SpeculatorSpec) -> list[str]:
    """Fields that hold what they can't."""
    wrong = count_problems(spec, {"drafts": 1, "weight_bytes": 0} | ({} if spec.depth is None else {"depth": 1}))
    if spec.hidden not in _HIDDEN:
        wrong.append(f"hidden is {spec.hidden!r}, must be one of {', '.join(_HIDDEN)}")
    return wrong


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
        self.speculation = self._speculation()
        drafts, trees = 0, False
        if self.speculation is not None:
            drafts, trees = self.speculation.drafts, self.speculation.depth is not None
        self.needs = derive_needs(
            self.config, self.checkpoint, self.spec, self.device, self.dtype, longest, self.page_size, drafts, trees
        )

    @property
    def speculator_need(self) -> SpeculatorNeed:
        wants = "sampler" in self.parts and self.selection.ask(
            "sampler", "wants_probs", self.selection.options("sampler")
        )
        return SpeculatorNeed(
            device=self.device,
            target=self.spec,
            slots=self.config.max_rows + 1,  # the last one is of idle rows
            max_length=self.max_length,
            wants_probs=bool(wants),
        )

    def _speculation(self) -> SpeculatorSpec | None:
        """Decided before the others: how wide decode rows are depends on it. None: there is none, or it is refused."""
        choice = self.config.speculator
        if choice is None:
            return None
        if not any(decision.where == "speculator" for decision in self.decisions) and "speculator" not in self.parts:
            self.decide("speculator", choice, self.speculator_need)
        if "speculator" not in self.parts:
            return None
        selection = self.selection
        spec = selection.ask("speculator", "describe", self.speculator_need, selection.options("speculator"))
        wrong = ["it is no SpeculatorSpec"] if not isinstance(spec, SpeculatorSpec) else _spec_problems(spec)
        if wrong:
            named = self.parts["speculator"].name
            raise PluginError(f"speculator {named!r}: describe returned {spec!r}: {'; '.join(wrong)}")
        found: SpeculatorSpec = spec
        return found

    def _speculation_problems(self) -> list[str]:
        spec = self.speculation
        if spec is None:
            return []
        named, problems = f"speculator = {self.parts['speculator'].name!r}", []
        if spec.taps or spec.layers:
            problems.append(
                f"{named} reads what inner layers of the target give or has layers in its cache: "
                "no executor does that yet"
            )
        if spec.hidden != "none" and not self.selection.factory("model").shares_ends:
            problems.append(f"{named} drafts with embedding and head of {self.spec.architecture}, which shares neither")
        most = choose_step_tokens(self.config, self.device)
        if spec.depth is not None and spec.drafts > _MOST_IN_TREE:
            problems.append(f"{named} gives trees of {spec.drafts} drafts; {_MOST_IN_TREE} are possible")
        if spec.drafts >= most:
            problems.append(f"{named} gives {spec.drafts} drafts; max_step_tokens = {most}: raise it")
        return problems

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
            role_of(where),
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
        made += [decision for decision in self.decisions if decision.where in ("executor", "speculator")]
        for index, choice in enumerate(config.logits_processors):
            made.append(self.decide(f"logits_processors[{index}]", choice, self.processor_need))
        for index, choice in enumerate(config.observers):
            made.append(self.decide(f"observers[{index}]", choice, None, static=False))
        made += self._decide_references()
        problems = [*self.problems, *unknown_allowed(self.config, self.registry), *self._shadow_problems()]
        problems += self._speculation_problems()
        problems += self._processor_problems()
        return problems + [reason for decision in made for reason in decision.reasons]

    @cached_property
    def processor_need(self) -> ProcessorNeed:
        """With the whole tokenizer, so it is made where processors are wanted only."""
        tokenizer, _ = read_tokenizer(self.checkpoint)
        sampler = self.needs.sampler
        return ProcessorNeed(
            device=sampler.device,
            vocab_size=sampler.vocab_size,
            slots=sampler.slots,
            max_length=sampler.max_length,
            eos_ids=eos_ids_of(self.checkpoint, tokenizer, vocab_limit(self.spec, tokenizer)),
            tokenizer_json=None if tokenizer is None else tokenizer.backend.to_str(),
        )

    def make_processors(self) -> dict[str, LogitsProcessor]:
        """By name, in the config's order."""
        selection = self.selection
        places = [where for where in self.parts if where.startswith("logits_processors")]
        made = {self.parts[where].name: selection.create(where, self.processor_need) for where in places}
        for name, processor in made.items():
            model = processor.arguments
            if model is not None and not (isinstance(model, type) and issubclass(model, BaseModel)):
                raise PluginError(
                    f"logits processor {name!r}: arguments is {model!r}, must be a pydantic model or None"
                )
        return made

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
        return [self.decide(where, choices[role_of(where)], need) for where, need in self.reference_needs.items()]

    def _shadow_problems(self) -> list[str]:
        if self.config.shadow is None or "executor" not in self.parts:
            return []
        if self.selection.factory("executor").shadows:
            return []
        return [f"executor = {self.parts['executor'].name!r} does not run parts beside others: leave `shadow` out"]

    def _processor_problems(self) -> list[str]:
        if not self.config.logits_processors or "executor" not in self.parts:
            return []
        if self.selection.factory("executor").processes:
            return []
        return [f"executor = {self.parts['executor'].name!r} runs no logits processors: leave `logits_processors` out"]

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


def read_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """(tokenizer, ""), or (None, what to do): a model without one that is read takes prompts of token ids."""
    files = checkpoint.tokenizer
    return (load_tokenizer(files), "") if has_tokenizer(files) else (None, no_tokenizer(files))


def vocab_limit(spec: ModelSpec, tokenizer: Tokenizer | None) -> int:
    return spec.vocab_size if tokenizer is None else min(spec.vocab_size, tokenizer.vocab_size)


def eos_ids_of(checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    named = eos_ids(checkpoint, vocab_size)
    if named is None and tokenizer is not None and tokenizer.eos_id is not None:
        return frozenset([tokenizer.eos_id])
    return named or frozenset()
