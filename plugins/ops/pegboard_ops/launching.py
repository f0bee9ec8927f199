"""Programmatic dependent launch (PDL): a kernel starts while the one before it in the stream ends.

Rules that every kernel here keeps: it waits for the kernel before it (`gdc_wait`) in every program before it reads
anything but weights and before it writes anything; so when it is complete, all before it are. Those that write the
cache let the next one start only after their own wait: attention relies on it, and reads what a step's first kernels
wrote before it waits."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from pegboard.contracts.device import DeviceFacts


class Launcher:
    """What launches on one device have in common."""

    def __init__(self, device: DeviceFacts, *, interpreted: bool = False) -> None:
        hopper = (device.capability or (0, 0)) >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait")
        self.interpreted = interpreted
        self.pdl = hopper and not interpreted
        #: Keywords of the launch.
        self.options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
