"""What an engine is to be: one frozen record, from TOML, YAML, JSON or a dict."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from .config_sources import apply_overrides, read_config
from .errors import ConfigError
from .registry.lock import lock_problems
from .registry.options import listed, nearest, validate
from .registry.parts import normalized
from .registry.resolution import resolve_static

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

    from .registry.registry import Registry

_DEVICE: Final = r"auto|cpu|cuda(:[0-9]+)?"
_AMOUNT: Final = r"([0-9]+(?:\.[0-9]+)?) ?(B|[KMGT]i?B|%)"
_MEMORY: Final = "auto, a positive number of bytes, an amount such as 2GiB, or a share such as 40%"
_UNITS: Final = {"B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("iB", 1024))
}
#: Fields that choose a part, and the role that each fills.
_CHOICES: Final = {
    "attention": "attention",
    "decode_attention": "attention",
    "cache": "cache",
    "scheduler": "scheduler",
    "sampler": "sampler",
    "quantizer": "quantizer",
    "ops": "ops",
    "executor": "executor",
    "speculator": "speculator",
}


#: Roles whose part can have another beside it.
_SHADOWED: Final = ("attention", "ops", "sampler")


def _check_device(value: str) -> str:
    if not re.fullmatch(_DEVICE, value):
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
    return value


def _path_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_memory(value: object) -> object:
    if isinstance(value, str) and value != "auto":
        number, unit = _amount(value)
        valid = number > 0 and (unit != "%" or number <= 100)
    else:
        valid = value == "auto" or (type(value) is int and value > 0)
    if not valid:
        raise ValueError(f"must be {_MEMORY}, got {value!r}")
    return value


def _amount(text: str) -> tuple[float, str]:
    """(2.0, "GiB") of "2GiB"."""
    found = re.fullmatch(_AMOUNT, text)
    if found is None:
        raise ValueError(f"must be {_MEMORY}, got {text!r}")
    return float(found[1]), found[2]


def _check_run_ahead(value: object) -> object:
    if value == "auto" or (type(value) is int and 0 <= value <= 4):
        return value
    raise ValueError(f"must be auto or 0 to 4, got {value!r}")


def _check_step_tokens(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"must be auto, or at least 1, got {value!r}")


def _check_page_size(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 16 and not value & (value - 1)):
        return value
    raise ValueError(f"must be auto, or a power of two and at least 16, got {value!r}")


_FROZEN: Final = ConfigDict(extra="forbid", frozen=True, strict=True)

Positive = Annotated[int, Field(ge=1)]


class PartChoice(BaseModel):
    """Which part fills a role. A bare string is short for {"use": ...}."""

    model_config = _FROZEN

    #: A part's name, or "auto".
    use: Annotated[str, Field(min_length=1)] = "auto"
    #: The part's own options, validated against its options model.
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @field_validator("options", mode="after")
    @classmethod
    def _own(cls, value: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(value)  # the caller may go on to change theirs

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        name = {"type": "string", "minLength": 1, "description": 'Short for {"use": ...}.'}
        return {"anyOf": [name, handler(schema)]}


def _check_named(choice: PartChoice) -> PartChoice:
    if choice.use == "auto":
        raise ValueError("observers must be named; there is no automatic choice of them")
    return choice


def _check_processor(choice: PartChoice) -> PartChoice:
    if choice.use == "auto":
        raise ValueError("logits processors must be named; there is no automatic choice of them")
    return choice


def _check_distinct(choices: tuple[PartChoice, ...]) -> tuple[PartChoice, ...]:
    names = [choice.use for choice in choices]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is listed twice: requests ask for a processor by its name")
    return choices


def _check_reference(choice: PartChoice) -> PartChoice:
    if choice.use == "auto":
        raise ValueError("the part to compare with must be named; there is no automatic choice of it")
    return choice


Reference = Annotated[PartChoice, AfterValidator(_check_reference)]


class ShadowConfig(BaseModel):
    """Parts that run beside the chosen ones on the same inputs, in some steps, to be compared with them."""

    model_config = _FROZEN

    #: Beside the attention of prefill and of decode rows.
    attention: Reference | None = None
    ops: Reference | None = None
    sampler: Reference | None = None
    #: Steps from one that is compared to the next.
    every: Positive = 10
    #: Absolute and relative; None: that of the dtype.
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _compares(self) -> ShadowConfig:
        if not self.references():
            raise ValueError(f"names nothing to compare with: give one of {', '.join(_SHADOWED)}")
        return self

    def references(self) -> dict[str, PartChoice]:
        """Role -> the part to compare with."""
        found = {role: getattr(self, role) for role in _SHADOWED}
        return {role: choice for role, choice in found.items() if choice is not None}


class PluginsConfig(BaseModel):
    model_config = _FROZEN

    #: Distributions whose parts `auto` may choose, beside pegboard's own.
    allow: tuple[str, ...] = Field(default=(), strict=False)
    #: A file made by `pegboard plugins lock`: what this config may use must be exactly what it says. None: no matter.
    lock: Annotated[str, BeforeValidator(_path_text), Field(min_length=1)] | None = None


class EngineConfig(BaseModel):
    """Everything that an engine is assembled from. Frozen; models and checkpoint readers are chosen by what they
    recognise, so they have no field."""

    model_config = _FROZEN

    #: A file or folder, or a name that `pegboard models` knows.
    model: Annotated[str, BeforeValidator(_path_text)] = Field(min_length=1)
    device: Annotated[str, AfterValidator(_check_device), Field(json_schema_extra={"pattern": f"^({_DEVICE})$"})] = (
        "auto"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float64"] = "auto"
    #: What the automatic choice favours.
    objective: Literal["latency", "throughput", "determinism", "memory"] = "throughput"
    #: Bytes for all pages of the KV cache.
    kv_memory: Annotated[
        int | str,
        BeforeValidator(_check_memory),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "integer", "minimum": 1},
                    {
                        "type": "string",
                        "pattern": f"^(auto|{_AMOUNT.replace('?P<number>', '').replace('?P<unit>', '')})$",
                    },
                ],
            }
        ),
    ] = "auto"
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "float64", "int8", "float8_e4m3fn"] = "auto"
    #: Entries a page; "auto": see `needs.page_sizes`.
    page_size: Annotated[
        int | str,
        BeforeValidator(_check_page_size),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 16}]}),
    ] = "auto"
    #: Longest prompt + output, in tokens; None: what the model was made for.
    max_length: Positive | None = None
    #: Sequences that run at once.
    max_rows: Positive = 64
    #: Tokens a step computes at most; "auto": see `needs.choose_step_tokens`.
    max_step_tokens: Annotated[
        int | str,
        BeforeValidator(_check_step_tokens),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
    ] = "auto"
    #: Sequences that wait at most.
    max_queue: Positive = 1024
    #: Steps that may fly while the host goes on.
    run_ahead: Annotated[
        int | str,
        BeforeValidator(_check_run_ahead),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 0, "maximum": 4}]}),
    ] = "auto"
    #: On CUDA, replay steps of a shape that comes again as one graph, where the parts allow it; false: launch their
    #: kernels one by one.
    cuda_graphs: bool = True
    #: Undelivered pieces that a request may have before it is paused.
    stream_buffer: Positive = 256
    #: A request's tokens don't depend on what runs beside it, bit for bit.
    batch_invariant: bool = False
    #: CPU threads for torch; None: as they are.
    threads: Positive | None = None

    attention: PartChoice = PartChoice()
    #: None: the same as `attention`.
    decode_attention: PartChoice | None = None
    cache: PartChoice = PartChoice()
    scheduler: PartChoice = PartChoice()
    sampler: PartChoice = PartChoice()
    #: Requests ask for those that they want.
    logits_processors: Annotated[
        tuple[Annotated[PartChoice, AfterValidator(_check_processor)], ...], AfterValidator(_check_distinct)
    ] = Field(default=(), strict=False)
    quantizer: PartChoice = PartChoice()
    ops: PartChoice = PartChoice()
    executor: PartChoice = PartChoice()
    #: None: no speculation.
    speculator: PartChoice | None = None
    #: Rows get as many drafts as pay by measured acceptance and cost; false: always as many as the speculator has.
    adapt_drafts: bool = True
    observers: tuple[Annotated[PartChoice, AfterValidator(_check_named)], ...] = Field(default=(), strict=False)
    #: None: no part runs beside another.
    shadow: ShadowConfig | None = None
    plugins: PluginsConfig = PluginsConfig()

    def kv_memory_bytes(self, available: int, auto: int) -> int:
        """Bytes for the KV cache when `available` bytes are left beside the weights; `auto` for "auto". ConfigError
        when more is asked for than there is."""
        if self.kv_memory == "auto":
            return auto
        if isinstance(self.kv_memory, int):
            wanted = self.kv_memory
        else:
            number, unit = _amount(self.kv_memory)
            wanted = int(available * number / 100 if unit == "%" else number * _UNITS[unit])
        if wanted > available:
            raise ConfigError(f"kv_memory: {self.kv_memory} is {wanted} bytes, but only {available} are available")
        return wanted

    def choices(self) -> tuple[tuple[str, str, PartChoice], ...]:
        """(path in the config, role, choice) of every part that the config chooses."""
        found = [(field, role, getattr(self, field)) for field, role in _CHOICES.items()]
        found += [(f"observers[{index}]", "observer", choice) for index, choice in enumerate(self.observers)]
        processors = enumerate(self.logits_processors)
        found += [(f"logits_processors[{index}]", "logits_processor", choice) for index, choice in processors]
        if self.shadow is not None:
            found += [(f"shadow.{role}", role, choice) for role, choice in self.shadow.references().items()]
        return tuple((where, role, choice) for where, role, choice in found if choice is not None)


def load_config(
    source: str | Path | Mapping[str, Any] | EngineConfig, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> EngineConfig:
    """The config in a TOML, YAML or JSON file, a mapping, or another config, with dotted keys overridden, e.g.
    ["cache.options.eviction=lru"]. ConfigError with every problem at once."""
    if isinstance(source, EngineConfig):
        if not overrides:
            return source
        values: Mapping[str, Any] = source.model_dump()
    elif isinstance(source, Mapping):
        values = source
    else:
        values = read_config(source)
    merged, problems = apply_overrides(
        values, overrides, {*_CHOICES, "observers", "logits_processors", *(f"shadow.{role}" for role in _SHADOWED)}
    )
    try:
        config = validate(EngineConfig, merged, "")
    except ConfigError as error:
        problems.extend(error.reasons)
    if problems:
        origin = f"config {source}" if isinstance(source, str | Path) else "config"
        raise ConfigError(f"{origin} is not valid", problems)
    return config


def config_schema() -> dict[str, Any]:
    """The JSON schema of a config."""
    return EngineConfig.model_json_schema()


def check_config(config: EngineConfig, registry: Registry) -> list[str]:
    """Everything in `config` that can't work with these plugins, as far as descriptors and options tell: names that
    don't exist, broken or ambiguous plugins, wrong options, missing dependencies, devices. Loads no model."""
    reasons = [f"{plugin.source} is broken: {plugin.reason}" for plugin in registry.broken_objects]
    reasons += unknown_allowed(config, registry) + lock_problems(config, registry)
    for decision in resolve_static(config, registry):
        reasons.extend(decision.reasons)
    return reasons


def unknown_allowed(config: EngineConfig, registry: Registry) -> list[str]:
    """Distributions in `plugins.allow` that are not there."""
    known = {normalized(name) for name in registry.distributions}
    return [
        f"plugins.allow: no installed distribution {name!r} offers plugins{nearest(name, known)}; "
        f"found: {listed(known)}; `pip install {name}`, or leave it out"
        for name in config.plugins.allow
        if normalized(name) not in known
    ]
