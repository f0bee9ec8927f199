"""A model that runs beside another one, with a cache of its own: what a draft model is.

Letters: R rows, w queries of each, E hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor

from pegboard.assembly import assemble
from pegboard.config import EngineConfig
from pegboard.contracts.batch import Batch, Bounds, Rows
from pegboard.contracts.model import StepContext
from pegboard.devices import torch_device
from pegboard.errors import ConfigError
from pegboard.plan import AssemblyPlan
from pegboard.registry.registry import Registry
from pegboard.survey import Survey

from .attending import Attending, Phase
from .making import load_model
from .model_runner import allocate_caches

#: Entries of a slot beyond the longest text: where what runs too far may write.
SPARE = 64


def plan_companion(
    model: str | Path, *, device: str, dtype: str, slots: int, max_length: int, max_query: int
) -> tuple[AssemblyPlan, Registry]:
    """What the model and the parts that run it will be, chosen automatically from what is installed; loads nothing.
    ConfigError, CheckpointError: it can't run."""
    config = EngineConfig(
        model=str(model),
        device=device,
        dtype=dtype,  # type: ignore[arg-type]  # pydantic says what is wrong with another
        max_rows=slots,
        max_step_tokens=max(slots, max_query),
        max_length=max_length,
    )
    registry = Registry.discover()
    plan = assemble(config, registry).plan
    if any(group.kind == "state" for group in plan.groups):
        raise ConfigError(f"{model}: a recurrent state can't take drafts back")
    return plan, registry


def companion_cache_bytes(plan: AssemblyPlan) -> int:
    """Of the cache of a companion; on a CPU, memory that no slot has used yet is not taken."""
    slots, pages = EngineConfig.model_validate(plan.config).max_rows, _pages(plan)
    return sum((1 + slots * pages) * group.page_bytes for group in plan.groups)


def _pages(plan: AssemblyPlan) -> int:
    """Of one slot."""
    return -(-(plan.max_length + SPARE) // plan.page_size)


class Companion:
    """Each slot has its pages for life, and whoever calls knows what they hold: `forward` writes entries where it is
    told and reads those before."""

    def __init__(self, plan: AssemblyPlan, registry: Registry) -> None:
        survey = Survey.of_plan(plan, registry)
        selection, needs = survey.selection, survey.needs
        self.device = torch_device(plan.device)
        self.spec = survey.spec
        self._model = load_model(plan, survey, selection.create("quantizer", needs.quantizer), None)
        survey.checkpoint.close()
        self._ops = selection.create("ops", needs.ops)
        slots, each = survey.config.max_rows, _pages(plan)
        self._caches = allocate_caches(
            plan.groups, [1 + slots * each] * len(plan.groups), len(survey.spec.layers), plan.page_size, self.device
        )
        prefill, decode = (
            selection.create("attention", needs.prefill),
            selection.create("decode_attention", needs.decode),
        )
        self._attending = Attending(
            Phase(prefill, self.device), Phase(decode, self.device), survey.spec.layers, self._caches
        )
        #: On CUDA its passes may be recorded.
        self.capturable = all(part.capturable for part in (self._model, self._ops, prefill, decode))
        self._page_size, self._groups, self._longest = plan.page_size, len(plan.groups), plan.max_length
        self._reach = each * plan.page_size
        #: [slots, pages] int32, alike in every group
        self._table = 1 + torch.arange(slots * each, dtype=torch.int32, device=self.device).view(slots, each)

    def forward(self, slots: Tensor, starts: Tensor, ids: Tensor, count: Tensor) -> Tensor:
        """Hidden states [R, w, E] after ids [R, w] at positions starts [R], starts + 1, ..., which end at most SPARE
        beyond the longest text; those from `count` [R] on are written nowhere and give anything."""
        with self._current():
            return self._forward(slots, starts, ids, count)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, V]"""
        with self._current():
            return self._model.logits(hidden, self._ops)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Kernels are launched on the current device, which may be the target's."""
        return contextlib.nullcontext() if self.device == "cpu" else torch.cuda.device(self.device)

    def _forward(self, slots: Tensor, starts: Tensor, ids: Tensor, count: Tensor) -> Tensor:
        rows, width = ids.shape
        step = torch.arange(width, device=ids.device)
        positions = starts[:, None] + step
        pages = self._table[slots]
        entry = pages.gather(1, positions // self._page_size).long() * self._page_size + positions % self._page_size
        entry = torch.where(step < count[:, None], entry, positions % self._page_size)  # the null page is nobody's
        reach = int(positions[:, -1].max()) + 1 if self.device == "cpu" else self._reach
        bounds = Bounds(rows=rows, tokens=rows * width, max_query=width, min_query=width, max_kv=reach)
        own = Rows(
            query_start=torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=ids.device),
            kv_len=(starts + width).to(torch.int32),
            page_table=pages[:, : -(-reach // self._page_size)],
            row_slot=slots,
            ancestors=None,
            bounds=bounds,
        )
        decodes = width == 1
        batch = Batch(
            ids=ids.flatten(),
            positions=positions.flatten().clamp(max=self._longest - 1),  # beyond the longest text nobody is right
            write_index=(entry.flatten(),) * self._groups,
            state_page=(None,) * self._groups,
            decode=(own,) * self._groups if decodes else None,
            prefill=None if decodes else (own,) * self._groups,
            decode_tokens=rows if decodes else 0,
            bounds=bounds,
        )
        self._attending.begin(batch)
        context = StepContext(batch=batch, ops=self._ops, caches=self._caches, attend=self._attending)
        return self._model.forward(context).hidden.view(rows, width, -1)
