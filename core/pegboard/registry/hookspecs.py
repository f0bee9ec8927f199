"""The hooks of pegboard. A manifest implements those of `PluginSpec`, an observer those of `ObserverSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pluggy

from ..contracts.observer import EngineReady, RequestAdmitted, RequestFinished, StepDone
from ..contracts.part import Part

PROJECT: Final = "pegboard"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
#: Marks a function or method as the implementation of the hook that it is named after.
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


class PluginSpec:
    """What a plugin's manifest implements."""

    @hookspec
    def pegboard_parts(self) -> Sequence[Part]:  # type: ignore[empty-body]
        """The parts that the plugin offers, as a list or tuple of descriptors.

        Called once an engine or command, before anything is chosen. It must be quick and import neither torch nor
        the parts themselves: a descriptor names them by import path. All parts of a plugin are taken or, when
        anything about one of them is wrong, none.
        """


class ObserverSpec:
    """What an observer may implement. Hooks run on the step's thread, so they must be quick; they are never called
    on the per-layer path. An observer whose hook raises is logged and told nothing more."""

    @hookspec
    def pegboard_engine_ready(self, event: EngineReady) -> None:
        """The engine is assembled and its weights are loaded; no request has been taken yet."""

    @hookspec
    def pegboard_request_admitted(self, event: RequestAdmitted) -> None:
        """A request was validated and handed to the scheduler."""

    @hookspec
    def pegboard_request_finished(self, event: RequestFinished) -> None:
        """A request ended, for whatever reason. Comes exactly once for each admitted request."""

    @hookspec
    def pegboard_step_done(self, event: StepDone) -> None:
        """A step retired and its outcome was committed and emitted."""

    @hookspec
    def pegboard_engine_closed(self) -> None:
        """The engine gave its memory back. The last hook that an observer sees."""
