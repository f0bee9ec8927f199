"""Linears for quantizers to make: checkpoints of their scheme, specs, and how far a row may be off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from ..contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed
from ..dtypes import torch_dtype
from .conformance import Candidate, Suite, check, normal
from .oracles.checkpoints import MemoryCheckpoint

#: Error of a row, relative to the size of x W^T, that the activations' dtype alone explains.
ERRORS: Final[Mapping[str, float]] = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


class QuantizerBench(Suite, standard=True):
    """What the tests of `QuantizerSuite` work with."""

    role = "quantizer"
    features = ("batch_invariant",)
    axes: ClassVar[Mapping[str, str]] = {"dtype": "dtypes", "count": "counts"}
    #: The checkpoint's quantization_config, and the storage types that it names.
    scheme: ClassVar[Mapping[str, Any]] = {}
    storages: ClassVar[tuple[str, ...]] = ("float32",)
    #: Declared: error of a row's result against float64 of the weights that the checkpoint means, relative to the size
    #: of x W^T. None: what the dtype of the activations explains.
    error: ClassVar[float | None] = None
    #: Input features, and output features of fused sources: whole groups and tiles of the scheme, on two ranks, too.
    in_features: ClassVar[int] = 256
    out_features: ClassVar[tuple[int, ...]] = (128, 64, 64)
    #: Rows of x: one, few and many take different kernels.
    counts: ClassVar[tuple[int, ...]] = (1, 2, 7, 33, 130)
    #: A module that `scheme` says to skip; it is stored dense. None: the scheme skips nothing.
    skips: ClassVar[str | None] = None

    # -- what is stored

    def store(self, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """A weight [O, I] float64 as the scheme stores it: tensors by the suffix of their names; and the weight that
        they mean, float64."""
        stored = weight.to(torch_dtype(self.storages[0]))
        return {"weight": stored}, stored.double()

    def checkpoint(self, spec: LinearSpec) -> tuple[MemoryCheckpoint, Tensor, Tensor | None]:
        """A checkpoint with the sources of the spec; the fused weight [O, I] and bias [O] that it means, float64."""
        stored: dict[str, Tensor] = {}
        weights, biases = [], []
        for number, (source, rows) in enumerate(zip(spec.sources, spec.out_features, strict=True)):
            tensors, meant = self.store(normal(rows, spec.in_features, seed=10 + number) / spec.in_features**0.5)
            stored |= {f"{source}.{suffix}": tensor for suffix, tensor in tensors.items()}
            weights.append(meant)
            if spec.bias:
                stored[f"{source}.bias"] = normal(rows, seed=20 + number).float()
                biases.append(stored[f"{source}.bias"].double())
        config = {"quantization_config": self.scheme} if self.scheme else {}
        stored["unrelated.weight"] = torch.zeros(4, 4)
        return MemoryCheckpoint(stored, config), torch.cat(weights), torch.cat(biases) if biases else None

    @classmethod
    def need(cls, dtype: str, **changes: Any) -> QuantizerNeed:
        fields: dict[str, Any] = {
            "device": cls.facts(),
            "dtype": dtype,
            "scheme": cls.scheme,
            "storages": frozenset(cls.storages),
            "max_rows": 8,
        }
        return QuantizerNeed(**(fields | changes))

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, QuantizerNeed]]:
        for dtype in cls.dtypes:
            yield f"dtype {dtype}", cls.need(dtype)
        for claim in cls.claims:
            yield f"claim {claim}", cls.need(cls.dtypes[0], **{claim: True})

    def fused(self, **changes: Any) -> LinearSpec:
        """Three sources with biases."""
        fields: dict[str, Any] = {
            "name": "layer.qkv",
            "sources": tuple(f"layer.{name}" for name in ("q", "k", "v")[: len(self.out_features)]),
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": True,
        }
        return LinearSpec(**(fields | changes))

    def single(self, **changes: Any) -> LinearSpec:
        """One source without a bias."""
        return self.fused(
            **{"name": "layer.down", "sources": ("layer.down",), "out_features": self.out_features[:1], "bias": False}
            | changes
        )

    def make(self, candidate: Candidate, dtype: str, **changes: Any) -> Quantizer:
        quantizer: Quantizer = candidate.create(self.need(dtype, **changes))
        return quantizer

    def inputs(self, count: int, dtype: str, seed: int = 1) -> Tensor:
        return normal(count, self.in_features, seed=seed).to(self.device, torch_dtype(dtype))

    def hold(
        self, found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: str, what: str, times: float = 1
    ) -> None:
        """Each row within the declared error (times so much)."""
        check(found.shape == (x.shape[0], weight.shape[0]), f"{what}: the result is {tuple(found.shape)}")
        product = x.cpu().double() @ weight.T
        exact = product if bias is None else product + bias
        bound = (ERRORS[dtype] if self.error is None else max(self.error, ERRORS[dtype])) * times
        # The bias is exact but for the rounding of the result
        size = product.norm(dim=1) * bound + exact.norm(dim=1) * ERRORS[dtype]
        off = (found.detach().cpu().double() - exact).norm(dim=1)
        wrong = ~(off <= size)
        if wrong.any():
            row = int((off / size).nan_to_num(torch.inf).argmax())
            share = float(off[row] / product[row].norm())
            raise AssertionError(f"{what}: row {row} is off by {share:.3g} of its size; {bound:.3g} is declared")
