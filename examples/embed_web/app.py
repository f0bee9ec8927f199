"""A small web app around an engine. Starlette and uvicorn are its own dependencies, not Pegboard's.

MODEL=smollm2-135m-instruct uvicorn app:app
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from pegboard import AsyncEngine, InvalidRequest, QueueFull, SamplingParams


def event(data: object) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


async def generate(request: Request) -> StreamingResponse | JSONResponse:
    """POST {"prompt": ..., "sampling": {...}} -> events with pieces of text, the last one with the finish reason."""
    engine: AsyncEngine = request.app.state.engine
    try:
        body = await request.json()
        prompt = body["prompt"]
        sampling = SamplingParams(**{"max_tokens": 64, **body.get("sampling", {})})
    except (ValueError, TypeError, KeyError, AttributeError):
        return JSONResponse({"error": 'the body must be JSON: {"prompt": ..., "sampling": {...}}'}, status_code=400)

    deltas = engine.stream(prompt, sampling)
    try:
        # The first piece, before the status is sent: what is refused becomes an answer of its own.
        first = await anext(deltas)
    except InvalidRequest as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    except QueueFull as error:
        return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})

    async def events() -> AsyncIterator[str]:
        # When the client goes away Starlette cancels this; aclosing then ends the request.
        async with aclosing(deltas):
            delta = first
            while True:
                yield event({"text": delta.text})
                if delta.finish_reason is not None:
                    yield event({"finish_reason": delta.finish_reason, "error": delta.error})
                    return
                delta = await anext(deltas)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def stats(request: Request) -> JSONResponse:
    found = request.app.state.engine.stats()
    return JSONResponse({"running": found.running, "waiting": found.waiting})


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """The engine lives as long as the app."""
    model = os.environ.get("MODEL", "smollm2-135m-instruct")
    async with await AsyncEngine.load(model, max_rows=16, max_length=4096) as engine:
        app.state.engine = engine
        yield


app = Starlette(
    lifespan=lifespan,
    routes=[Route("/generate", generate, methods=["POST"]), Route("/stats", stats)],
)
