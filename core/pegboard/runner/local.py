"""LocalExecutor: the runner in this process, on one device."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from pegboard.contracts.executor import Executor, ExecutorNeed, MemoryReport
from pegboard.contracts.scheduler import StepPlan, StepResult
from pegboard.devices import torch_device
from pegboard.dtypes import torch_dtype
from pegboard.errors import EngineDead

from . import step_memory
from .device_streams import give_stream, take_stream
from .ends import ModelEnds
from .loading import load_apart
from .making import load_model
from .model_runner import ModelRunner
from .step_shape import Limits
from .stepping import RunnerParts

if TYPE_CHECKING:
    from pegboard.contracts.quantizer import Quantizer
    from pegboard.contracts.speculator import Speculator
    from pegboard.needs import Needs
    from pegboard.plan import AssemblyPlan
    from pegboard.registry.registry import Registry
    from pegboard.selection import Selection
    from pegboard.survey import Survey


class Launched(Protocol):
    """A step that has not retired."""

    def result(self) -> StepResult: ...


class StepRunner(Protocol):
    """A ModelRunner, or one that lets others run some of its steps."""

    def launch(self, plan: StepPlan) -> Launched: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...


class LocalExecutor(Executor):
    """Steps run on this process's device in the order of launch; results are read when they retire."""

    shadows = True
    processes = True

    def __init__(
        self,
        runner: StepRunner,
        weight_bytes: int,
        unused_tensors: tuple[str, ...],
        device: str,
        threads: int | None,
    ) -> None:
        self._runner: StepRunner | None = runner
        self._weight_bytes = weight_bytes
        self._unused_tensors = unused_tensors
        self._device = device
        self._threads = threads
        #: Steps have a stream of their own: the default one can't be recorded, and other engines use it.
        self._stream = None if device == "cpu" else take_stream(device)
        self._tickets: deque[Launched] = deque()
        if device == "cpu":
            step_memory.keep()

    @classmethod
    def refusals(cls, need: ExecutorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def create(
        cls,
        need: ExecutorNeed,
        options: Any,
        *,
        plan: Callable[[], bytes],
        restore: Callable[[], Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        made, registry = restore()
        return load_apart(lambda report: cls._load(made, registry, report), progress)

    @classmethod
    def _load(cls, made: AssemblyPlan, registry: Registry, report: Callable[[int, int], None]) -> Self:
        from pegboard.survey import Survey  # the executor is loaded by assembly, not the other way round

        device = torch_device(made.device)
        survey = Survey.of_plan(made, registry)
        selection, needs = survey.selection, survey.needs
        model = load_model(made, survey, cls._quantizer(selection, needs), report)
        ops, speculator = selection.create("ops", needs.ops), cls._speculator(survey)
        speculation = survey.speculation
        hidden = "none" if speculation is None else speculation.hidden
        if speculator is not None and hidden != "none":
            ends = ModelEnds(model, ops, torch_dtype(made.dtype), made.vocab_limit)
            selection.call("speculator", speculator, "attach", ends)
        parts = RunnerParts(
            model=model,
            spec=survey.spec,
            ops=ops,
            prefill=selection.create("attention", needs.prefill),
            decode=selection.create("decode_attention", needs.decode),
            sampler=selection.create("sampler", needs.sampler),
            speculator=speculator,
            hidden=hidden,
            tree_depth=None if speculation is None else speculation.depth,
            processors=survey.make_processors(),
        )
        runner = ModelRunner(
            parts,
            groups=made.groups,
            pages=made.pages,
            limits=Limits(
                rows=survey.config.max_rows,
                step_tokens=needs.scheduler.max_step_tokens,
                length=made.max_length,
                decode_width=needs.scheduler.decode_width,
            ),
            page_size=made.page_size,
            device=device,
            vocab_limit=made.vocab_limit,
            padded=cls.pads(device),
            recorded=device != "cpu" and survey.config.cuda_graphs,
            adapts=survey.config.adapt_drafts,
        )
        made_runner = cls._watched(runner, survey)
        # Weights may be views of the mapped file: the mapping lives as long as they do.
        survey.checkpoint.close()
        if device != "cpu":
            torch.cuda.synchronize(device)  # steps run in another stream than this thread's
        executor = cls(made_runner, model.weight_bytes, model.unused_tensors, device, survey.config.threads)
        try:
            with executor._on_device():
                runner.rehearse()
        except BaseException:  # it has a stream, and memory, to give back
            executor.close()
            raise
        return executor

    @classmethod
    def pads(cls, device: str) -> bool:
        """Whether steps are filled up to shapes that come again."""
        return device != "cpu"

    @classmethod
    def _quantizer(cls, selection: Selection, needs: Needs) -> Quantizer:
        made: Quantizer = selection.create("quantizer", needs.quantizer)
        return made

    @classmethod
    def _speculator(cls, survey: Survey) -> Speculator | None:
        if survey.config.speculator is None:
            return None
        made: Speculator = survey.selection.create("speculator", survey.speculator_need)
        return made

    @classmethod
    def _watched(cls, runner: ModelRunner, survey: Survey) -> StepRunner:
        """The runner as it is, or what the config's `shadow` makes of it."""
        shadow = survey.config.shadow
        if shadow is None:
            return runner
        from pegboard.shadow.runner import References, ShadowRunner

        made = {where: survey.selection.create(where, need) for where, need in survey.reference_needs.items()}
        references = References(
            prefill=made.get("shadow.attention"),
            decode=made.get("shadow.decode_attention"),
            ops=made.get("shadow.ops"),
            sampler=made.get("shadow.sampler"),
        )
        return ShadowRunner(runner, references, shadow.every, shadow.tolerance)

    @property
    def flying(self) -> int:
        return len(self._tickets)

    def launch(self, plan: StepPlan) -> None:
        if self._runner is None:
            raise EngineDead("the executor was closed")
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # a setting of the calling thread, so not at creation
        with self._on_device():
            self._tickets.append(self._runner.launch(plan))

    def retire(self, depth: int) -> StepResult | None:
        if len(self._tickets) <= depth:
            return None
        ticket = self._tickets.popleft()
        with self._on_device():
            return ticket.result()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Its device is the current one inside. EngineDead: an error has left the device unusable."""
        if self._device == "cpu":
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            except Exception as error:
                try:
                    torch.cuda.synchronize()
                except Exception as broken:
                    raise EngineDead(f"the device {self._device} can't be used any more: {broken}") from error
                raise

    def memory(self) -> MemoryReport:
        if self._runner is None:
            return MemoryReport(weights=0, kv_cache=0, workspace=0)
        return MemoryReport(
            weights=self._weight_bytes,
            kv_cache=self._runner.cache_bytes,
            workspace=self._runner.workspace_bytes,
        )

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        return self._unused_tensors

    def close(self) -> None:
        if self._runner is None:
            return
        self._runner = None
        self._tickets.clear()
        gc.collect()
        if self._device == "cpu":
            step_memory.give_back()
        else:
            # A device that is broken has nothing to give back
            with torch.cuda.device(self._device), contextlib.suppress(RuntimeError):
                if self._stream is not None:
                    self._stream.synchronize()
                    give_stream(self._device, self._stream)
                    self._stream = None
                torch.cuda.empty_cache()
