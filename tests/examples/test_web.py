"""examples/embed_web behind a real server on loopback, with a real client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="needs pegboard[test]")
pytest.importorskip("uvicorn", reason="needs pegboard[test]")
pytest.importorskip("starlette", reason="needs pegboard[test]")

FOLDER = Path(__file__).parents[2] / "examples" / "embed_web"


@pytest.fixture(scope="module")
def client(tiny_text_model: Path, environment: dict[str, str]) -> Iterator[Any]:
    """uvicorn in a process of its own, on a port that the system chooses."""
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"],
        cwd=FOLDER,
        env={**environment, "MODEL": str(tiny_text_model), "PYTHONWARNINGS": "default"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    log: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in server.stderr or ():
            log.append(line)
            if "running on" in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(60)
        address = re.search(r"http://127\.0\.0\.1:\d+", "".join(log))
        assert address, "".join(log)
        with httpx.Client(base_url=address[0], timeout=60, trust_env=False) as made:
            yield made
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        reader.join(20)
        server.stderr.close()
    text = "".join(log)
    assert "Traceback" not in text, text
    assert "Application shutdown complete" in text or os.name == "nt"


def events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.supports("Engine", "in a web app: server-sent events, ended when the client goes away")
def test_a_client_that_goes_away_ends_its_request(client: Any) -> None:
    body = {"prompt": "Once upon a time", "sampling": {"max_tokens": 4000, "ignore_eos": True}}
    with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        coming = events(response)  # dropping it would close the response
        assert "text" in next(coming)
        assert client.get("/stats").json()["running"] == 1
    until = time.monotonic() + 10
    while client.get("/stats").json() != {"running": 0, "waiting": 0}:
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.02)


def test_events_come_piece_by_piece_and_end_with_the_reason(client: Any) -> None:
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with client.stream("POST", "/generate", json={"prompt": "Hello", "sampling": sampling}) as response:
        found = list(events(response))
    assert found[-1] == {"finish_reason": "length", "error": None}
    assert [set(event) for event in found[:-1]] == [{"text"}] * 8


def test_several_clients_at_once(client: Any) -> None:
    results: list[int] = []

    def ask(index: int) -> None:
        body = {"prompt": f"Number {index}", "sampling": {"max_tokens": 12}}
        with client.stream("POST", "/generate", json=body) as response:
            results.append(len(list(events(response))))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 6
    assert min(results) >= 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "must be JSON"),
        (b"[1]", "must be JSON"),
        (b"{}", "must be JSON"),
        (b'{"prompt": "x", "sampling": {"max_token": 1}}', "must be JSON"),
        (b'{"prompt": []}', "empty"),
        (b'{"prompt": "x", "sampling": {"max_tokens": 0}}', "max_tokens is 0"),
        (b'{"prompt": "x", "sampling": {"max_tokens": "many"}}', "max_tokens is 'many'"),
    ],
)
def test_what_is_refused_is_a_400_with_the_reason(client: Any, body: bytes, reason: str) -> None:
    answer = client.post("/generate", content=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]
