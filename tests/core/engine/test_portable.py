"""A plan's bytes, taken to a fresh process, give the same parts there, and the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pegboard import ConfigError, Engine, Part, PluginError, SamplingParams, hookimpl
from pegboard.assembly import restore
from pegboard_sampling.torch_sampler import TorchSampler

PROMPT = [1, 17, 42, 200, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

#: Reads a plan on stdin, rebuilds the executor of this process from it, runs one prompt, and says what it found.
REBUILD = """
import json, sys
from pegboard.assembly import restore
from pegboard.contracts.executor import ExecutorNeed
from pegboard.contracts.sampler import SamplingParams, SlotOpening
from pegboard.contracts.scheduler import RowPlan, SlotPages, StepPlan
from pegboard.runner import LocalExecutor

data = sys.stdin.buffer.read()
plan, registry = restore(data)
executor = LocalExecutor.create(
    ExecutorNeed(device=plan.device), None, plan=lambda: data, restore=lambda: restore(data)
)
prompt = tuple(json.loads(sys.argv[1]))
opening = SlotOpening(
    slot=0, sampling=SamplingParams(temperature=0.0), seed=0, prompt=prompt, max_length=len(prompt) + 1
)
row = RowPlan(id="r", slot=0, query=len(prompt), start=0, tokens=prompt, opening=opening)
executor.launch(StepPlan(id=1, rows=(row,), tables=(SlotPages(slot=0, group=0, start=0, pages=(1,)),)))
assert executor.flying == 1
tokens = executor.retire(0).rows[0].tokens
assert executor.flying == 0
memory = executor.memory()
executor.close()
parts = {where: [part.name, part.plugin, part.distribution, part.options] for where, part in plan.parts.items()}
print(json.dumps({"tokens": tokens, "parts": parts, "again": plan.encode() == data, "kv_cache": memory.kv_cache}))
"""

PLUGIN = """
from pegboard import Part, hookimpl
from pegboard_sampling.torch_sampler import TorchSampler


class Second(TorchSampler):
    '''The second best token.'''

    def sample(self, logits, rows):
        logits = logits.clone()
        logits.scatter_(1, logits.argmax(-1, keepdim=True), float("-inf"))
        return super().sample(logits, rows)


class Offers:
    @hookimpl
    def pegboard_parts(self):
        return [Part(role="sampler", name="second", factory=Second, summary="the second best")]


OFFERS = Offers()


@hookimpl
def pegboard_parts():
    return [Part(role="sampler", name="second", factory=Second, summary="the second best")]
"""


def rebuild(data: bytes, prompt: list[int], *paths: Path) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REBUILD, json.dumps(prompt)],
        input=data,
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def order(tiny_path: Path) -> list[int]:
    """Next tokens after the prompt, best first, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
    with torch.no_grad():
        best = model(torch.tensor([PROMPT])).logits[0, -1].sort(descending=True)
    assert best.values[:3].diff().max() < -1e-3, "a close call: rounding might decide"
    return list(best.indices.tolist())


def described(engine: Engine) -> dict[str, Any]:
    parts = engine.plan.parts.items()
    return {where: [part.name, part.plugin, part.distribution, part.options] for where, part in parts}


def test_a_fresh_process_makes_the_same_parts(
    tiny_path: Path, make_engine: Callable[..., Engine], order: list[int]
) -> None:
    engine = make_engine(
        tiny_path,
        device="cpu",
        max_rows=3,
        max_length=128,
        run_ahead=1,
        page_size=32,
        scheduler={"use": "static", "options": {"batch": 2}},
        cache={"use": "paged", "options": {"prefix_reuse": False}},
        decode_attention="torch",
    )
    found = rebuild(engine.plan.encode(), PROMPT)
    assert found["parts"] == described(engine)
    assert found["parts"]["scheduler"][3] == {"batch": 2}
    assert found["tokens"] == [order[0]]
    assert found["again"] is True
    assert found["kv_cache"] == sum(
        pages * group.page_bytes for pages, group in zip(engine.plan.pages, engine.plan.groups, strict=True)
    )


def test_the_plan_is_the_same_after_a_round_trip(tiny_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_length=64)
    plan, registry = restore(engine.plan.encode())
    assert plan == engine.plan
    assert {part.part.name for part in registry.parts("sampler")} >= {"torch"}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A plugin in an importable module that no distribution offers."""
    import importlib

    (tmp_path / "second_best_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("second_best_plugin")
    sys.modules.pop("second_best_plugin")


@pytest.mark.parametrize("kind", ["module", "object"])
def test_plugin_objects_that_can_be_imported_go_along(
    tiny_path: Path, tmp_path: Path, make_engine: Callable[..., Engine], module: Any, order: list[int], kind: str
) -> None:
    plugin = module if kind == "module" else module.OFFERS
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=64, plugins=[plugin], sampler="second")
    assert engine.submit(PROMPT, GREEDY).result(timeout=20).raise_for_error().token_ids == (order[1],)
    found = rebuild(engine.plan.encode(), PROMPT, tmp_path)
    assert found["tokens"] == [order[1]]
    assert found["parts"] == described(engine)


def test_a_plugin_that_is_not_there_is_named(
    tiny_path: Path, make_engine: Callable[..., Engine], module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=64, plugins=[module], sampler="second")
    data = engine.plan.encode()
    monkeypatch.undo()
    sys.modules.pop("second_best_plugin")
    with pytest.raises(PluginError, match="second_best_plugin"):
        restore(data)
    sys.modules["second_best_plugin"] = module


class Local(TorchSampler):
    pass


class Offers:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="sampler", name="local", factory=Local, summary="for a test")]


def test_a_plugin_object_that_can_not_leave_is_refused_there_and_works_here(
    tiny_path: Path, make_engine: Callable[..., Engine], order: list[int]
) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=64, plugins=[Offers()], sampler="local")
    with pytest.raises(ConfigError, match=r"another process") as caught:
        engine.plan.encode()
    assert "Offers" in str(caught.value)
    assert "importable module" in str(caught.value)
    assert engine.submit(PROMPT, GREEDY).result(timeout=20).token_ids == (order[0],)


def test_an_object_that_no_longer_is_what_its_module_holds(
    tiny_path: Path, make_engine: Callable[..., Engine], module: Any
) -> None:
    """A second object of the same class is not the one that an import would find."""
    engine = make_engine(
        tiny_path, device="cpu", max_rows=1, max_length=64, plugins=[module.Offers()], sampler="second"
    )
    with pytest.raises(ConfigError, match="another process"):
        engine.plan.encode()


def changed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    found = json.loads(data)
    change(found)
    return msgspec.json.encode(found)


def test_another_version_is_refused(tiny_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=64)

    def change(plan: dict[str, Any]) -> None:
        plan["parts"]["sampler"]["version"] = "99.5"

    with pytest.raises(PluginError, match=r"sampler.*99\.5.*install the same version"):
        restore(changed(engine.plan.encode(), change))


def test_a_part_that_is_not_here_is_refused(tiny_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=64)

    def change(plan: dict[str, Any]) -> None:
        plan["parts"]["attention"] |= {"name": "flash", "plugin": "flash", "distribution": "pegboard-flash"}

    with pytest.raises(PluginError, match="flash"):
        restore(changed(engine.plan.encode(), change))
