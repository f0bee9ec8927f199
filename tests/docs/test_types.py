"""A type checker sees the public names as the guides tell: what calls return, and what plugins must give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: An expression of docs/embedding.md and docs/plugins.md -> its type.
REVEALED = {
    "Engine('m').generate('one')": "pegboard.request.RequestOutput",
    "Engine('m').generate(['one', 'two'])": "list[pegboard.request.RequestOutput]",
    "Engine('m').generate([[1, 2]])": "list[pegboard.request.RequestOutput]",
    "Engine('m').submit('one')": "pegboard.streams.Handle",
    "Engine('m').submit('one').result()": "pegboard.request.RequestOutput",
    "next(iter(Engine('m').submit('one')))": "pegboard.request.Delta",
    "Engine('m').stats()": "pegboard.stats.EngineStats",
    "Engine('m').plan": "pegboard.plan.AssemblyPlan",
    "Engine.from_config('engine.toml')": "pegboard.engine.Engine",
    "Engine.from_config('engine.toml').__enter__()": "pegboard.engine.Engine",
    "load_config('engine.toml')": "pegboard.config.EngineConfig",
    "Registry.discover()": "pegboard.registry.registry.Registry",
    "SamplingParams(temperature=0.0).max_tokens": "int | None",
    "Part(role='cache', name='n', factory='m:C', summary='').contract": "int",
    "ConfigError('m').reasons": "tuple[str, ...]",
}

#: What a type checker must object to.
WRONG = {
    "Engine('m').generate(1)": "call-overload|arg-type",
    "SamplingParams(temprature=1.0)": "call-arg",
    "Part(role='cache', name='n', factory='m:C', summary='', kind=1)": "call-arg",
}


@pytest.mark.full  # mypy reads torch, which takes a minute
def test_public_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = ["from pegboard import ConfigError, Engine, Part, Registry, SamplingParams, load_config"]
    lines += [f"reveal_type({expression})" for expression in REVEALED]
    lines += list(WRONG)
    (tmp_path / "uses.py").write_text("\n".join(lines) + "\n")
    roots = [ROOT / "core", *sorted((ROOT / "plugins").iterdir())]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "uses.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, roots)), "MYPY_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told: dict[int, str] = {}
    for found in re.finditer(r"uses\.py:(\d+): (.*)", done.stdout):
        told.setdefault(int(found[1]), found[2])  # an error comes before its notes
    for line, (expression, kind) in enumerate(REVEALED.items(), 2):
        revealed = re.fullmatch(r'note: Revealed type is "(.*)"', told.get(line, done.stderr))
        assert revealed, f"{expression}: {told.get(line)}"
        assert revealed[1].replace("builtins.", "") == kind, expression
    for line, (expression, code) in enumerate(WRONG.items(), 2 + len(REVEALED)):
        assert re.search(rf"error: .*\[({code})\]", told.get(line, "")), f"{expression}: {told.get(line)}"
