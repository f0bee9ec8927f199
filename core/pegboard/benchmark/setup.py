"""What ran: the head of every report."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec

from ..engine import Engine


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    device: str
    dtype: str
    threads: int
    parts: dict[str, str]
    versions: dict[str, str]
    date: str
    config: dict[str, Any]


def setup(engine: Engine) -> Setup:
    import torch

    plan, threads = engine.plan, engine.config.threads
    return Setup(
        model=plan.model,
        device=f"{plan.device.type} ({plan.device.name or platform.machine()})",
        dtype=plan.dtype,
        threads=torch.get_num_threads() if threads is None else threads,
        parts={where: part.name for where, part in plan.parts.items()},
        versions={"pegboard": metadata.version("pegboard"), "torch": str(torch.__version__)},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        config=plan.config,
    )
