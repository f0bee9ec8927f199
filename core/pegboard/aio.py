"""AsyncEngine: the engine for event loops. The step stays on the engine's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from .contracts.sampler import SamplingParams
from .engine import Engine, Message
from .errors import ConfigError
from .request import Delta, Prompt, Request, RequestOutput
from .stats import EngineStats
from .streams import Handle


class AsyncEngine:
    """Wraps an Engine. Nothing here blocks the loop: loading, closing and tokenizing happen on other threads.

    >>> async with await AsyncEngine.load("smollm2-135m-instruct") as engine:  # doctest: +SKIP
    ...     async for delta in engine.stream("Hello"):
    ...         print(delta.text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        """Around an engine that is there; `await AsyncEngine.load(...)` makes one."""
        if not isinstance(engine, Engine):
            raise ConfigError(f"AsyncEngine wraps an Engine, not {engine!r}: use await AsyncEngine.load({engine!r})")
        self.engine = engine

    @classmethod
    async def load(cls, model: str | Path | None = None, **settings: Any) -> Self:
        """Arguments as for Engine."""
        return cls(await asyncio.to_thread(Engine, model, **settings))

    @classmethod
    async def from_config(cls, source: Mapping[str, Any] | str | Path, **settings: Any) -> Self:
        return cls(await asyncio.to_thread(Engine.from_config, source, **settings))

    async def stream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Deltas as they come. Leaving the loop, or cancelling the task, aborts the request."""
        handle = await self._submit(prompt, sampling, **options)
        news = asyncio.Event()
        loop = asyncio.get_running_loop()
        handle.listen(lambda: _ring(loop, news))
        try:
            while not handle.done:
                news.clear()
                while (delta := handle.take_now()) is not None:
                    yield delta
                if not handle.done:
                    await news.wait()
        finally:
            handle.abort()

    async def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Delta]:
        request = await asyncio.to_thread(self.engine.chat_request, messages, template=template)
        async for delta in self.stream(request, sampling, **options):
            yield delta

    async def generate(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The whole output of one prompt. Cancelling the task aborts the request."""
        handle = await self._submit(prompt, sampling, **options)
        handle.gather()
        finished = asyncio.Event()
        loop = asyncio.get_running_loop()
        handle.listen(lambda: None if handle.live else _ring(loop, finished))
        try:
            await finished.wait()
        finally:
            handle.abort()
        return handle.result()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RequestOutput:
        request = await asyncio.to_thread(self.engine.chat_request, messages, template=template)
        return await self.generate(request, sampling, **options)

    def abort(self, id: str) -> bool:
        """End a request; False if no such request is live."""
        return self.engine.abort(id)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def _submit(self, prompt: Prompt | Request, sampling: SamplingParams | None, **options: Any) -> Handle:
        made: list[Handle] = []
        abandoned = threading.Event()

        def submit() -> Handle:
            made.append(self.engine.submit(prompt, sampling, **options))
            if abandoned.is_set():
                made[0].abort()
            return made[0]

        task = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The thread goes on, even when the loop does not, and may still admit what nobody would ever take.
            abandoned.set()
            for handle in list(made):
                handle.abort()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks for its error
            raise

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


def _ring(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed; nobody waits there any more
        loop.call_soon_threadsafe(news.set)
