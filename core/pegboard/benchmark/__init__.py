"""Speed of an assembled engine: what `pegboard bench` prints."""

from __future__ import annotations

from .end_to_end import EndToEnd, Load, Memory, Ready, Repeated, measure_end_to_end
from .host import HostTime, HostWatch
from .profiling import KernelTime, Profile, profile_runs
from .setup import Setup, setup
from .speed import ITL, TTFT, Prompts, Throughput, measure_itl, measure_throughput, measure_ttft

__all__ = [
    "ITL",
    "TTFT",
    "EndToEnd",
    "HostTime",
    "HostWatch",
    "KernelTime",
    "Load",
    "Memory",
    "Profile",
    "Prompts",
    "Ready",
    "Repeated",
    "Setup",
    "Throughput",
    "measure_end_to_end",
    "measure_itl",
    "measure_throughput",
    "measure_ttft",
    "profile_runs",
    "setup",
]
