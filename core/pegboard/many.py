"""Many prompts at once: submit as the bounded queue admits, keep the order, lose nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .contracts.sampler import SamplingParams
from .errors import InvalidRequest, QueueFull
from .request import Prompt, Request, RequestOutput, check_options, check_request
from .streams import Handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Engine

#: Seconds between tries while other callers fill the queue.
_RETRY = 0.01


def generate_many(
    engine: Engine,
    prompts: Sequence[Prompt | Request],
    sampling: SamplingParams | None,
    *,
    progress: bool,
    **options: Any,
) -> list[RequestOutput]:
    """Outputs in the order of the prompts; what could not be admitted carries its error."""
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        raise InvalidRequest("a list of numbers is one prompt of token ids: put it into a list, [[1, 2, 3]]")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise InvalidRequest("these prompts look like messages of a conversation: use `chat`")
    check_options(options)
    # What is wrong with all of them is the caller's mistake
    check_request(Request(prompt="", **options))
    if sampling is not None:
        engine.check(sampling)
    outputs: dict[int, RequestOutput] = {}
    running: deque[tuple[int, Handle]] = deque()
    with _bar(len(prompts), progress) as advance, _aborting(running):

        def collect() -> None:
            index, handle = running[0]  # one that is waited for still counts as running
            outputs[index] = handle.result()
            running.popleft()
            advance()

        for index, prompt in enumerate(prompts):
            while True:
                try:
                    handle = engine.submit(prompt, sampling, **options)
                    handle.gather()
                    running.append((index, handle))
                    break
                except InvalidRequest as error:
                    outputs[index] = RequestOutput(id="", prompt_token_ids=(), completions=(), error=str(error))
                    advance()
                    break
                except QueueFull:
                    if running:
                        collect()
                    else:
                        time.sleep(_RETRY)
        while running:
            collect()
    return [outputs[index] for index in range(len(prompts))]


@contextmanager
def _aborting(running: deque[tuple[int, Handle]]) -> Iterator[None]:
    """Who stops waiting (Ctrl-C) wants no more of what was submitted."""
    try:
        yield
    except BaseException:
        for _, handle in running:
            handle.abort()
        raise


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
