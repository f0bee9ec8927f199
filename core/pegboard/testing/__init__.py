"""Public test tools for plugin authors: a conformance suite a role, reference oracles, a simulated device, tiny models.

Nothing here is imported by the engine. Names are loaded when they are first used (PEP 562); the suites need pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionSuite as AttentionSuite
    from .cache import CacheSuite as CacheSuite
    from .checkpoint import CheckpointSuite as CheckpointSuite
    from .clock import FakeClock as FakeClock
    from .conformance import Candidate as Candidate
    from .conformance import Outcome as Outcome
    from .conformance import Suite as Suite
    from .conformance import Tolerance as Tolerance
    from .conformance import run_suite as run_suite
    from .engines import IsolatedEngine as IsolatedEngine
    from .engines import isolated_engine as isolated_engine
    from .engines import isolated_registry as isolated_registry
    from .faulty import Faults as Faults
    from .logits_processor import ProcessorSuite as ProcessorSuite
    from .model import ModelSuite as ModelSuite
    from .ops import OpsSuite as OpsSuite
    from .quantizer import QuantizerSuite as QuantizerSuite
    from .sampler import SamplerSuite as SamplerSuite
    from .scheduler import SchedulerSuite as SchedulerSuite
    from .simulated import SimulatedDevice as SimulatedDevice
    from .speculator import SpeculatorSuite as SpeculatorSuite
    from .tiny import tiny_model as tiny_model
    from .tiny import write_tokenizer as write_tokenizer

_HOMES = {
    "AttentionSuite": "attention",
    "CacheSuite": "cache",
    "Candidate": "conformance",
    "CheckpointSuite": "checkpoint",
    "FakeClock": "clock",
    "Faults": "faulty",
    "IsolatedEngine": "engines",
    "ModelSuite": "model",
    "OpsSuite": "ops",
    "Outcome": "conformance",
    "ProcessorSuite": "logits_processor",
    "QuantizerSuite": "quantizer",
    "SamplerSuite": "sampler",
    "SchedulerSuite": "scheduler",
    "SimulatedDevice": "simulated",
    "SpeculatorSuite": "speculator",
    "Suite": "conformance",
    "Tolerance": "conformance",
    "isolated_engine": "engines",
    "isolated_registry": "engines",
    "run_suite": "conformance",
    "tiny_model": "tiny",
    "write_tokenizer": "tiny",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{home}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ModuleNotFoundError(
            f"{name} is made of pytest tests, and pytest is not installed: `pip install pytest`", name="pytest"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
