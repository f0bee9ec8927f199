"""Tables of measured cuts, by device: what `pegboard tune` writes, the option `table` reads, and this plugin ships."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, Literal

import msgspec

from pegboard.contracts.device import DeviceFacts
from pegboard.errors import ConfigError

from .cuts import AnyCut
from .layout import TILE
from .legal import Place, illegal

FORMAT: Final = "pegboard-int4-cuts"
#: Those that are shipped, a file a device.
_SHIPPED: Final = Path(__file__).parent / "tables"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fastest cut of a product."""

    outputs: int
    inputs: int
    #: Columns a group: 32, 64, or 128 for all that are of whole tiles.
    group: Literal[32, 64, 128]
    #: Measured with so many rows: it serves these, and fewer down to more than half as many.
    rows: int
    cut: AnyCut
    microseconds: float


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that was measured on devices of one name. Nothing is measured where it is used: the same table gives the same
    kernels, and so the same bits."""

    format: Literal["pegboard-int4-cuts"] = FORMAT
    version: Literal[1] = 1
    #: As torch names it.
    device: str
    capability: tuple[int, int]
    cuts: tuple[Entry, ...]


class Cuts:
    """A table by product."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._found: dict[tuple[int, int, int], list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: entry.rows):
            self._found.setdefault((entry.outputs, entry.inputs, entry.group), []).append(entry)

    def cut(self, rows: int, outputs: int, inputs: int, group: int) -> AnyCut | None:
        """None: nothing was measured for such a product."""
        for entry in self._found.get((outputs, inputs, min(group, TILE)), ()):
            if entry.rows >= rows:
                return entry.cut if entry.rows < 2 * rows else None
        return None


def load_table(path: Path, device: DeviceFacts) -> Table:
    """ConfigError: no table, of another device, or with a cut that this one can't run."""
    again = "make one with `pegboard tune`"
    try:
        table = msgspec.json.decode(path.read_bytes(), type=Table)
    except OSError as error:
        raise ConfigError(f"table {path} can't be read: {error.strerror}; {again}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"table {path} is no table of INT4 cuts, version 1: {error}; {again}") from error
    if table.device != device.name:
        raise ConfigError(f"table {path} was measured on {table.device!r}, this is {device.name!r}; {again} here")
    for number, entry in enumerate(table.cuts):
        reason = "outputs, inputs and rows must be 1 or more"
        if min(entry.outputs, entry.inputs, entry.rows) >= 1:
            place = Place(outputs=entry.outputs, inputs=entry.inputs, group=entry.group, rows=entry.rows)
            reason = illegal(entry.cut, place, device.capability or (0, 0)) or ""
        if reason:
            raise ConfigError(f"table {path}: cuts[{number}] can't run: {reason}; {again}")
    return table


def cuts_for(device: DeviceFacts, path: Path | None) -> Cuts:
    """Of the table in `path`; None: of the shipped one for such devices, or else for their compute capability.
    ConfigError as `load_table`."""
    if path is not None:
        return Cuts(load_table(path, device).cuts)
    near = [table for table in shipped() if table.capability == device.capability]
    near.sort(key=lambda table: table.device != device.name)
    return Cuts(near[0].cuts if near else ())


@cache
def shipped() -> tuple[Table, ...]:
    """By the names of their files."""
    return tuple(msgspec.json.decode(file.read_bytes(), type=Table) for file in sorted(_SHIPPED.glob("*.json")))
