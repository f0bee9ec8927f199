"""Building a model's parts from a checkpoint, with every missing or misshapen tensor reported at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from pegboard.contracts.model import ModelKit
from pegboard.contracts.ops import Norm
from pegboard.contracts.quantizer import Linear, LinearSpec
from pegboard.errors import CheckpointError

logger = logging.getLogger("pegboard")

#: Buffers that old checkpoints carry and that are computed here.
_DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight", ".attn.bias", ".attn.masked_bias")


class Loader:
    """Reads named tensors, counts progress, and collects what is wrong and raises it at once."""

    def __init__(self, kit: ModelKit) -> None:
        self._kit = kit
        self._infos = kit.checkpoint.tensors()
        self._used: set[str] = set()
        self._problems: list[str] = []
        self._done = 0
        self._total = sum(info.nbytes for info in self._infos.values())

    def check(self, linears: Sequence[LinearSpec], vectors: dict[str, tuple[int, ...]]) -> None:
        """Note what is missing and what plain tensor has the wrong shape; `linears` raises it."""
        wanted = [name for spec in linears for name in self._kit.quantizer.tensor_names(spec, self._infos)]
        for name in dict.fromkeys([*wanted, *vectors]):
            if name not in self._infos:
                self._problems.append(f"missing tensor {name}")
        for name, shape in vectors.items():
            if name in self._infos and self._infos[name].shape != shape:
                self._problems.append(f"tensor {name} has shape {self._infos[name].shape}, the config says {shape}")

    def tensor(self, name: str) -> Tensor:
        self._count([name])
        return self._kit.checkpoint.read(name, dtype=self._kit.dtype, device=self._kit.device)

    def norm(self, name: str, eps: float, *, offset: float = 0.0, round_first: bool = True) -> Norm:
        return Norm(weight=self.tensor(name), eps=eps, offset=offset, round_first=round_first)

    def linears(self, specs: Sequence[LinearSpec]) -> dict[str, Linear]:
        """Every linear by name. Raises once, for all that `check` noted and all that could not be made."""
        made: dict[str, Linear] = {}
        for spec in specs:
            names = self._kit.quantizer.tensor_names(spec, self._infos)
            if not all(name in self._infos for name in names):
                continue
            self._count(names)
            try:
                made[spec.name] = self._kit.quantizer.linear(spec, self._kit.checkpoint, self._kit.shard)
            except CheckpointError as error:
                self._problems.append(str(error))
        self._raise()
        return made

    def unused(self) -> tuple[str, ...]:
        """Stored tensors that nothing used; logged, too."""
        unused = sorted(n for n in self._infos if n not in self._used and not any(d in n for d in _DERIVED))
        if unused:
            shown = ", ".join(unused[:8]) + (", ..." if len(unused) > 8 else "")
            logger.warning("%d tensors of the checkpoint are not used by the model: %s", len(unused), shown)
        return tuple(unused)

    def _count(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._infos and name not in self._used:
                self._used.add(name)
                self._done += self._infos[name].nbytes
        if self._kit.progress is not None:
            self._kit.progress(self._done, self._total)

    def _raise(self) -> None:
        if self._problems:
            raise CheckpointError("the checkpoint does not fit its config:\n  - " + "\n  - ".join(self._problems))
