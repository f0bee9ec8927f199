"""A plugin whose parts fail on purpose, for tests of what an app does when a part raises, gives NaN or takes long."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from pegboard.contracts.part import Part
from pegboard.registry.hookspecs import hookimpl
from pegboard.registry.interfaces import INTERFACES

from .engines import isolated_registry

#: Fields of the config that choose a part, and two roles that no field chooses: the role that each stands for.
PLACES: Final[Mapping[str, str]] = {
    "attention": "attention",
    "decode_attention": "attention",
    "cache": "cache",
    "scheduler": "scheduler",
    "sampler": "sampler",
    "quantizer": "quantizer",
    "ops": "ops",
    "executor": "executor",
    "model": "model",
    "checkpoint": "checkpoint",
}

#: Roles whose parts no field of the config names.
_UNNAMED: Final = ("model", "checkpoint")


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that has happened."""

    #: "sampler.sample"
    where: str
    #: Which call it was, from 1.
    call: int


class _Base(NamedTuple):
    """A part that is made to fail."""

    name: str
    factory: type
    options: type | None
    matches: tuple[str, ...]


class _Fault(msgspec.Struct, frozen=True, kw_only=True):
    call: int
    #: How many calls from there on; None: all.
    times: int | None
    before: Callable[[], None] | None = None
    after: Callable[[Any], Any] | None = None

    def strikes(self, call: int) -> bool:
        return call >= self.call and (self.times is None or call < self.call + self.times)


class Faults:
    """A plugin object, and the settings that choose its parts.

    >>> faults = Faults()
    >>> faults.fail("sampler.sample", call=3)
    >>> with isolated_engine(path, plugins=[faults], **faults.settings) as engine:  # doctest: +SKIP
    ...     engine.generate(...)

    A phase is a method of the role's contract: "attention.forward", "cache.reserve", "executor.launch", ...; an
    attention backend may be put in for decode rows alone, as "decode_attention.forward". Calls are counted over all
    parts that the plugin has made, from 1, whoever calls. Each part is one of Pegboard's own, or the class given to
    `wrap`, with its methods watched. Safe from any thread; state faults before the engine is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: dict[str, _Base] = {}
        self._faults: dict[str, list[_Fault]] = {}
        self._counts: dict[str, int] = {}
        self._hits: list[Hit] = []
        self._registry = isolated_registry()

    # -- saying what goes wrong --------------------------------------------------------------------------------------

    def fail(
        self, where: str, *, call: int = 1, times: int | None = 1, error: Exception | type[Exception] | None = None
    ) -> None:
        """The `call`-th call of the phase raises `error` (RuntimeError without one), and so do the `times - 1` after
        it; `times=None`: all after it. ValueError: no such phase, naming those that are."""
        raised = RuntimeError(f"injected fault in {where}") if error is None else error

        def before() -> None:
            raise raised

        self._add(where, _Fault(call=call, times=times, before=before))

    def spoil(self, where: str, *, call: int = 1, times: int | None = 1) -> None:
        """What the phase returns has NaN in place of every float, in tensors and records alike. The call raises
        TypeError when there is none in it."""
        self._add(where, _Fault(call=call, times=times, after=functools.partial(_spoilt, where)))

    def delay(self, where: str, *, seconds: float, call: int = 1, times: int | None = 1) -> None:
        """The phase waits before it does its work."""
        if not seconds >= 0:
            raise ValueError(f"a delay of {seconds} seconds")
        self._add(where, _Fault(call=call, times=times, before=functools.partial(time.sleep, seconds)))

    def wrap(self, place: str, factory: type, options: type | None = None, matches: Sequence[str] = ()) -> None:
        """Let the part of this place ("cache", "decode_attention", ...) be a `factory` that takes `options`, instead
        of Pegboard's own; `matches` as in its `Part` (models, checkpoints, quantizers)."""
        _role(place)
        self._bases[place] = _Base(_name(place), factory, options, tuple(matches))

    # -- what happened -----------------------------------------------------------------------------------------------

    @property
    def hits(self) -> tuple[Hit, ...]:
        """The faults that have happened, in their order."""
        with self._lock:
            return tuple(self._hits)

    def calls(self, where: str) -> int:
        """Calls of a watched phase so far."""
        with self._lock:
            return self._counts.get(where, 0)

    def reset(self) -> None:
        """Count from 1 again, e.g. after requests that warm an engine up; `hits` are forgotten."""
        with self._lock:
            self._counts.clear()
            self._hits.clear()

    # -- the plugin --------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """For the engine: each field of the config whose part has faults, with that part's name. Models and checkpoints
        need none: the part that fails comes before all others."""
        return {place: _name(place) for place in self._places() if place not in _UNNAMED}

    @hookimpl
    def pegboard_parts(self) -> Sequence[Part]:
        return [part for place in self._places() for part in self._parts(place)]

    def _places(self) -> list[str]:
        return sorted({where.partition(".")[0] for where in self._faults})

    def _parts(self, place: str) -> list[Part]:
        phases = sorted(where.partition(".")[2] for where in self._faults if where.partition(".")[0] == place)
        first = PLACES[place] in _UNNAMED
        return [
            Part(
                role=PLACES[place],
                name=base.name,
                factory=self._faulty(place, phases, base.factory),
                options=base.options,
                summary=f"{base.factory.__name__} that fails on purpose in {', '.join(phases)}",
                # Chosen by what they recognise, so they must come before the parts that they stand for.
                priority=1_000_000 if first else 0,
                matches=base.matches,
            )
            for base in self._bases_of(place)
        ]

    def _bases_of(self, place: str) -> list[_Base]:
        """What is made to fail: the class given to `wrap`, or the parts that an engine would take on any device."""
        if place in self._bases:
            return [self._bases[place]]
        own = self._registry.parts(PLACES[place])
        if PLACES[place] in _UNNAMED:
            return [
                _Base(f"{_name(place)}-{entry.part.name}", entry.load(), entry.options_model(), entry.part.matches)
                for entry in own
            ]
        anywhere = [entry for entry in own if not entry.part.devices]
        best = max(anywhere, key=lambda entry: ("none" in entry.part.matches, entry.part.priority))
        return [_Base(_name(place), best.load(), best.options_model(), best.part.matches)]

    def _faulty(self, place: str, phases: Sequence[str], base: type) -> type:
        methods = {phase: self._watched(f"{place}.{phase}", getattr(base, phase)) for phase in phases}
        return type(f"Faulty{base.__name__}", (base,), methods)

    def _watched(self, where: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            struck = self._count(where)
            for fault in struck:
                if fault.before is not None:
                    fault.before()
            result = method(*args, **kwargs)
            for fault in struck:
                if fault.after is not None:
                    result = fault.after(result)
            return result

        return call

    def _count(self, where: str) -> list[_Fault]:
        with self._lock:
            number = self._counts[where] = self._counts.get(where, 0) + 1
            struck = [fault for fault in self._faults[where] if fault.strikes(number)]
            self._hits += [Hit(where=where, call=number)] * bool(struck)
            return struck

    def _add(self, where: str, fault: _Fault) -> None:
        place, _, phase = where.partition(".")
        phases = _phases(_role(place))
        if phase not in phases:
            raise ValueError(f"{place} has no phase {phase!r}; phases: {', '.join(phases)}")
        if fault.call < 1 or (fault.times is not None and fault.times < 1):
            raise ValueError(f"call {fault.call}, {fault.times} times: both count from 1")
        with self._lock:
            self._faults.setdefault(where, []).append(fault)


def _role(place: str) -> str:
    if place not in PLACES:
        raise ValueError(f"{place!r} is no place of a part; places: {', '.join(PLACES)}")
    return PLACES[place]


def _name(place: str) -> str:
    return f"faulty-{place}"


def _phases(role: str) -> tuple[str, ...]:
    """Methods of instances: what the engine calls once a part is made."""
    return tuple(
        name
        for name, value in vars(INTERFACES[role]).items()
        if callable(value) and not name.startswith("_") and not isinstance(value, classmethod)
    )


def _spoilt(where: str, result: Any) -> Any:
    spoilt, found = _with_nan(result)
    if not found:
        raise TypeError(f"{where} returned {type(result).__name__}, in which nothing can be NaN")
    return spoilt


def _with_nan(value: Any) -> tuple[Any, bool]:
    """The value with NaN for every float, and whether there was one."""
    import torch

    if isinstance(value, torch.Tensor):
        return (torch.full_like(value, float("nan")), True) if value.is_floating_point() else (value, False)
    if isinstance(value, float):
        return float("nan"), True
    if isinstance(value, msgspec.Struct):
        fields = {name: _with_nan(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **{n: v for n, (v, hit) in fields.items() if hit}), any(
            hit for _, hit in fields.values()
        )
    if isinstance(value, tuple):
        items = [_with_nan(item) for item in value]
        return tuple(item for item, _ in items), any(hit for _, hit in items)
    return value, False
