"""Which device an engine gets, and what it has."""

from __future__ import annotations

from .contracts.device import DeviceFacts
from .errors import ConfigError


def device_facts(asked: str) -> DeviceFacts:
    """`asked` is "auto", "cpu", "cuda" or "cuda:N". ConfigError: not here."""
    import torch

    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return _cpu()
    if not torch.cuda.is_available():
        raise ConfigError(f"device {asked!r} was asked for, but torch sees no CUDA device here: use 'cpu' or 'auto'")
    index = int(asked.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {asked!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(
        type="cuda",
        index=index,
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        total_bytes=total,
        free_bytes=free,
    )


def _cpu() -> DeviceFacts:
    import platform

    import psutil

    memory = psutil.virtual_memory()
    return DeviceFacts(
        type="cpu", name=platform.processor() or "cpu", total_bytes=memory.total, free_bytes=memory.available
    )


def torch_device(facts: DeviceFacts) -> str:
    """The name by which torch knows it."""
    return "cpu" if facts.type == "cpu" else f"{facts.type}:{facts.index}"
