"""Public test tools for plugin authors: a conformance suite a role, reference oracles, a simulated device, tiny models.

Nothing here is imported by the engine. Names are loaded when they are first used (PEP 562); the suites need pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionSuite as AttentionSuite
    from .clock import FakeClock as FakeClock
    from .conformance import Candidate as Candidate
    from .conformance import Outcome as Outcome
    from .conformance import Suite as Suite
    from .conformance import Tolerance as Tolerance
    from .conformance import run_suite as run_suite
    from .ops import OpsSuite as OpsSuite
    from .quantizer import QuantizerSuite as QuantizerSuite
    from .sampler import SamplerSuite as SamplerSuite
    from .simulated import SimulatedDevice as SimulatedDevice
    from .tiny import tiny_model as tiny_model

_HOMES = {
    "AttentionSuite": "attention",
    "Candidate": "conformance",
    "FakeClock": "clock",
    "OpsSuite": "ops",
    "Outcome": "conformance",
    "QuantizerSuite": "quantizer",
    "SamplerSuite": "sampler",
    "SimulatedDevice": "simulated",
    "Suite": "conformance",
    "Tolerance": "conformance",
    "run_suite": "conformance",
    "tiny_model": "tiny",
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
