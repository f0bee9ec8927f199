"""Parts by their place in a plan: factories, options, and making them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .contracts.attention import AttentionLayer, AttentionNeed, KVLayout
from .errors import PluginError
from .plan import ChosenPart
from .registry.interfaces import class_method
from .registry.parts import RegisteredPart
from .registry.registry import Registry


class Selection:
    """The winners of a plan, each with its validated options. Rebuilt wherever the plan goes."""

    def __init__(self, registry: Registry, parts: Mapping[str, ChosenPart]) -> None:
        self._registry = registry
        self._parts = parts

    def factory(self, where: str) -> Any:
        return self._entry(where).load()

    def options(self, where: str) -> Any:
        return self._entry(where).options(self._parts[where].options, f"{where}.options")

    def create(self, where: str, need: Any, **extra: Any) -> Any:
        return self._entry(where).create(need, self.options(where), **extra)

    def ask(self, where: str, method: str, *arguments: Any) -> Any:
        """Call a class method of a winner that describes something."""
        entry = self._entry(where)
        with entry.blamed(method):
            return class_method(role_of(where), entry.load(), method)(*arguments)

    def call(self, where: str, made: Any, method: str, *arguments: Any) -> None:
        """A method of what a winner has made."""
        with self._entry(where).blamed(method):
            getattr(made, method)(*arguments)

    def layouts(self, where: str, need: AttentionNeed, layer: AttentionLayer) -> Sequence[KVLayout]:
        """What an attention backend reads for a layer, best first."""
        found: Sequence[KVLayout] = self.ask(where, "layouts", need, layer, self.options(where))
        if not isinstance(found, list | tuple) or not all(isinstance(layout, KVLayout) for layout in found):
            source = self._entry(where).source
            raise PluginError(f"{where} of {source}: layouts returned {found!r}, not a list of KVLayout")
        return found

    def _entry(self, where: str) -> RegisteredPart:
        part = self._parts[where]
        return self._registry.exactly(role_of(where), part.name, part.plugin, part.distribution)


def role_of(where: str) -> str:
    if where.startswith("observers"):
        return "observer"
    if where.startswith("logits_processors"):
        return "logits_processor"
    where = where.removeprefix("shadow.")
    return "attention" if where == "decode_attention" else where
