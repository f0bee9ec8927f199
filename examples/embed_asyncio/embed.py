"""A model inside an event loop: many requests at once, one cancelled, one late.

python embed.py [MODEL] [--max-tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing

from pegboard import AsyncEngine, DeadlineExceeded, SamplingParams


async def many(engine: AsyncEngine, tokens: int) -> None:
    """Each is a task of its own; the engine puts them into the same steps."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = ["The sea is", "The sky is", "The sun is"]
    outputs = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    print("many:", [len(output.token_ids) for output in outputs])


async def cancelled(engine: AsyncEngine) -> None:
    """Cancelling the task that waits ends the request, and its memory comes back."""
    begun = asyncio.Event()

    async def listen() -> None:
        endless = SamplingParams(seed=1, ignore_eos=True)
        async with aclosing(engine.stream("Once upon a time", endless)) as deltas:
            async for _ in deltas:
                begun.set()

    task = asyncio.create_task(listen())
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    while engine.stats().running:
        await asyncio.sleep(0.01)
    print("cancelled:", task.cancelled(), "running:", engine.stats().running)


async def late(engine: AsyncEngine) -> None:
    """A deadline ends a request wherever it is, in the queue too."""
    output = await engine.generate("Once upon a time", SamplingParams(seed=1, ignore_eos=True), timeout=0.05)
    print("late:", output.finish_reason)
    try:
        output.raise_for_error()
    except DeadlineExceeded as error:
        print("raised:", error)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    async with await AsyncEngine.load(options.model, max_rows=8, max_length=8192) as engine:
        await many(engine, options.max_tokens)
        await cancelled(engine)
        await late(engine)


if __name__ == "__main__":
    asyncio.run(main())
