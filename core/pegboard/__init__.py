"""An LLM inference engine that you assemble from plugins.

Names are loaded when they are first used, so that `import pegboard` costs nothing (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aio import AsyncEngine as AsyncEngine
    from .assembly import plan_engine as plan_engine
    from .config import EngineConfig as EngineConfig
    from .config import load_config as load_config
    from .contracts.observer import RequestMetrics as RequestMetrics
    from .contracts.part import Part as Part
    from .contracts.sampler import SamplingParams as SamplingParams
    from .contracts.sampler import TokenLogprobs as TokenLogprobs
    from .engine import Engine as Engine
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DeadlineExceeded as DeadlineExceeded
    from .errors import EngineDead as EngineDead
    from .errors import InvalidRequest as InvalidRequest
    from .errors import PegboardError as PegboardError
    from .errors import PluginError as PluginError
    from .errors import QueueFull as QueueFull
    from .errors import RequestFailed as RequestFailed
    from .plan import AssemblyPlan as AssemblyPlan
    from .registry.hookspecs import hookimpl as hookimpl
    from .registry.registry import Registry as Registry
    from .request import Completion as Completion
    from .request import Delta as Delta
    from .request import Request as Request
    from .request import RequestOutput as RequestOutput
    from .stats import EngineStats as EngineStats
    from .streams import Handle as Handle

_HOMES = {
    "AssemblyPlan": "plan",
    "AsyncEngine": "aio",
    "CheckpointError": "errors",
    "Completion": "request",
    "ConfigError": "errors",
    "DeadlineExceeded": "errors",
    "Delta": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "EngineStats": "stats",
    "Handle": "streams",
    "InvalidRequest": "errors",
    "Part": "contracts.part",
    "PegboardError": "errors",
    "PluginError": "errors",
    "QueueFull": "errors",
    "Registry": "registry.registry",
    "Request": "request",
    "RequestFailed": "errors",
    "RequestMetrics": "contracts.observer",
    "RequestOutput": "request",
    "SamplingParams": "contracts.sampler",
    "TokenLogprobs": "contracts.sampler",
    "hookimpl": "registry.hookspecs",
    "load_config": "config",
    "plan_engine": "assembly",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pegboard' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
