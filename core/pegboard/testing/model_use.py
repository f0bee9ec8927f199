"""A model without an engine: rows of tokens in, the logits of each of them out, over a cache full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer, AttentionNeed
from pegboard.contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.model import DecoderModel, ModelKit, ModelNeed, ModelOutput, ModelSpec, StepContext
from pegboard.contracts.ops import Ops
from pegboard.contracts.quantizer import Quantizer, QuantizerNeed, Shard
from pegboard.contracts.scheduler import RowPlan, SlotPages
from pegboard.devices import torch_device
from pegboard.errors import CheckpointError
from pegboard.ops import TorchOps
from pegboard.pairing import Backend, make_groups
from pegboard.registry.registry import Registry
from pegboard.runner.attending import Attending, Phase
from pegboard.runner.batching import pack, unpack
from pegboard.runner.device_state import DeviceState
from pegboard.runner.model_runner import allocate_caches
from pegboard.runner.step_shape import Limits, exact_shape, split_rows

from .conformance import Candidate

PAGE_SIZE = 16
SLOTS = 4


def open_checkpoint(path: Path, registry: Registry) -> Checkpoint:
    """By whichever installed reader recognises it. CheckpointError: none does."""
    for entry in registry.parts("checkpoint"):
        reader = entry.load()
        if reader.recognises(path):
            opened: Checkpoint = reader.open(path)
            return opened
    raise CheckpointError(f"{path} is of no known format")


class Doctored(Checkpoint):
    """Another checkpoint with tensors hidden, or a row longer than they are, that notes what is read."""

    def __init__(self, base: Checkpoint, *, hidden: Sequence[str] = (), longer: Sequence[str] = ()) -> None:
        self._base, self._longer = base, longer
        self._infos = {name: self._info(info) for name, info in base.tensors().items() if name not in hidden}
        #: Names that were read.
        self.read_names: set[str] = set()

    def _info(self, info: TensorInfo) -> TensorInfo:
        if info.name not in self._longer:
            return info
        first, *others = info.shape
        return TensorInfo(name=info.name, shape=(first + 1, *others), storage=info.storage, nbytes=info.nbytes)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, path: Path) -> Self:
        raise CheckpointError(f"{path} is opened by its own reader")

    @property
    def config(self) -> Mapping[str, Any]:
        return self._base.config

    @property
    def generation(self) -> Mapping[str, Any]:
        return self._base.generation

    @property
    def tokenizer(self) -> TokenizerFiles:
        return self._base.tokenizer

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(
        self,
        name: str,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        dim: int = 0,
        start: int = 0,
        length: int | None = None,
    ) -> Tensor:
        if name not in self._infos:
            raise CheckpointError(f"there is no tensor {name!r}")
        self.read_names.add(name)
        if name not in self._longer:
            return self._base.read(name, dtype=dtype, device=device, dim=dim, start=start, length=length)
        whole = self._base.read(name, dtype=dtype, device=device)
        whole = torch.cat((whole, whole[:1]))
        return whole.narrow(dim, start, whole.shape[dim] - start if length is None else length)

    def read_blocks(self, name: str) -> Tensor:
        self.read_names.add(name)
        return self._base.read_blocks(name)

    def close(self) -> None:
        self._base.close()


class ModelUse:
    """One model, loaded. Prefill and decode rows are mixed by the torch attention backend, all else is `TorchOps`."""

    def __init__(
        self,
        candidate: Candidate,
        checkpoint: Checkpoint,
        registry: Registry,
        *,
        facts: DeviceFacts,
        dtype: str = "float32",
        max_length: int = 96,
        taps: tuple[int, ...] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.need = ModelNeed(config=checkpoint.config, device=facts)
        candidate.require(self.need)
        self.spec: ModelSpec = candidate.factory.describe(self.need)
        self.device = torch_device(facts)
        self.max_length = max_length
        storages = frozenset(info.storage for info in checkpoint.tensors().values())
        dense = registry.matching("quantizer", "none")
        needed = QuantizerNeed(device=facts, dtype=dtype, storages=storages)
        self.quantizer: Quantizer = dense.load().create(needed, dense.options({}))
        kit = ModelKit(
            spec=self.spec,
            config=checkpoint.config,
            checkpoint=checkpoint,
            quantizer=self.quantizer,
            shard=Shard(),
            device=self.device,
            dtype=dtype,
            max_length=max_length,
            taps=taps,
            progress=progress,
        )
        self.model: DecoderModel = candidate.factory.create(kit)
        self.ops: Ops = TorchOps()
        self._build_cache(registry, facts, dtype)

    def _build_cache(self, registry: Registry, facts: DeviceFacts, dtype: str) -> None:
        entry = registry.get("attention", "torch")
        backend, options = entry.load(), entry.options({})
        layers = tuple(dict.fromkeys(layer for layer in self.spec.layers if isinstance(layer, AttentionLayer)))

        def need(phase: Literal["prefill", "decode"]) -> AttentionNeed:
            return AttentionNeed(
                device=facts,
                dtype=dtype,
                kv_dtype=dtype,
                page_size=PAGE_SIZE,
                layers=layers,
                phase=phase,
                max_query=self.max_length if phase == "prefill" else 1,
                max_rows=SLOTS,
                max_length=self.max_length,
            )

        needs = [need("prefill"), need("decode")]
        sides = [Backend("torch", partial(backend.layouts, n, options=options)) for n in needs]
        groups = make_groups(self.spec.layers, sides[0], sides[1], self.ops)
        each = -(-self.max_length // PAGE_SIZE)
        pages = [1 + SLOTS * (1 if group.kind == "state" else each) for group in groups]
        self._caches = allocate_caches(groups, pages, len(self.spec.layers), PAGE_SIZE, self.device)
        for cache in self._caches:
            for tensor in cache.tensors.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))  # whoever reads what nobody wrote gets NaN
        prefill, decode = (Phase(backend.create(n, options), self.device) for n in needs)
        self._attending = Attending(prefill, decode, self.spec.layers, self._caches)
        self._state = DeviceState(groups, SLOTS, self.max_length, PAGE_SIZE, 1, self.device)
        random, tables = Random(0), []
        for group, count in zip(groups, pages, strict=True):
            order = random.sample(range(1, count), count - 1)
            share = len(order) // SLOTS
            tables += [
                SlotPages(slot=slot, group=group.index, start=0, pages=tuple(order[slot * share : (slot + 1) * share]))
                for slot in range(SLOTS)
            ]
        self._state.apply(tables)

    def context(
        self, rows: Sequence[tuple[int, Sequence[int], int]], outputs: Sequence[int] | None = None
    ) -> StepContext:
        """For rows (slot, tokens, position of the first), those of one token first; `outputs`: the tokens wanted."""
        plans = [
            RowPlan(id=str(slot), slot=slot, query=len(tokens), start=start, tokens=tuple(tokens))
            for slot, tokens, start in rows
        ]
        limits = Limits(rows=SLOTS, step_tokens=SLOTS * self.max_length, length=self.max_length, decode_width=1)
        shape = exact_shape(plans, limits)
        packed = pack(plans, split_rows(plans, 1), shape, self._state.idle)
        step = unpack(torch.from_numpy(packed).to(self.device), shape, self._state, self.ops)
        self._attending.begin(step.batch)
        wanted = None if outputs is None else torch.tensor(outputs, dtype=torch.int64, device=self.device)
        return StepContext(batch=step.batch, ops=self.ops, caches=self._caches, attend=self._attending, outputs=wanted)

    @torch.inference_mode()
    def forward(self, *rows: tuple[int, Sequence[int], int]) -> ModelOutput:
        return self.model.forward(self.context(rows))

    @torch.inference_mode()
    def logits(self, *rows: tuple[int, Sequence[int], int]) -> list[Tensor]:
        """[n, V] for each row of n tokens, float32 on the CPU. Rows of one token must come first."""
        hidden = self.forward(*rows).hidden
        logits = self.model.logits(hidden, self.ops).float().cpu()
        return list(torch.split(logits, [len(tokens) for _, tokens, _ in rows]))
