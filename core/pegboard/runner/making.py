"""From an assembly plan to a loaded model with the parts that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.contracts.model import DecoderModel, ModelKit
from pegboard.devices import torch_device

if TYPE_CHECKING:
    from pegboard.contracts.quantizer import Quantizer
    from pegboard.plan import AssemblyPlan
    from pegboard.survey import Survey


def load_model(
    made: AssemblyPlan, survey: Survey, quantizer: Quantizer, report: Callable[[int, int], None] | None
) -> DecoderModel:
    """The plan's model with its weights. The checkpoint is the caller's to close, when the weights' views are made;
    it is closed here if loading fails."""
    try:
        kit = ModelKit(
            spec=survey.spec,
            config=survey.checkpoint.config,
            checkpoint=survey.checkpoint,
            quantizer=quantizer,
            shard=survey.shard,
            device=torch_device(made.device),
            dtype=made.dtype,
            max_length=made.max_length,
            progress=report,
        )
        model: DecoderModel = survey.selection.factory("model").create(kit)
    except BaseException:
        survey.checkpoint.close()
        raise
    return model
