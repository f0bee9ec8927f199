"""The distributions of examples/third_party are found, chosen, checked and left alone like any stranger's."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import ConfigError, Engine, Registry, SamplingParams
from pegboard.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "shortest-job-first": ("scheduler", "shortest-job-first", {"ageing": 50.0}),
    "streaming-attention": ("attention", "streaming", {"window": 256}),
}
PACKAGES = tuple(name.replace("-", "_") for name in EXAMPLES)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(3, 60)), [5, 6]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions, built and unpacked as an installer would."""
    out = tmp_path_factory.mktemp("third-party")
    build = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
    for name in EXAMPLES:
        folder = ROOT / "examples" / "third_party" / name
        subprocess.run([sys.executable, "-c", build, str(out)], cwd=folder, check=True, timeout=120)
    for wheel in out.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    forget()
    monkeypatch.syspath_prepend(str(site))
    yield site
    forget()


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]


def test_both_are_found_by_their_entry_points(installed: Path) -> None:
    registry = Registry.discover()
    assert registry.broken == ()
    for distribution, (role, name, _) in EXAMPLES.items():
        entry = registry.get(role, name)
        assert (entry.distribution, entry.version, entry.first_party) == (distribution, "0.1.0", False)
    assert not any(f"{package}.options" in sys.modules for package in PACKAGES)


@pytest.mark.supports("Plugins", "third-party distributions: found by entry point, chosen by config, options checked")
def test_a_config_chooses_them(installed: Path, tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    choices = {role: {"use": name, "options": options} for role, name, options in EXAMPLES.values()}
    engine = make_engine(tiny_path, device="cpu", config=choices)
    for distribution, (role, name, options) in EXAMPLES.items():
        part = engine.plan.parts[role]
        assert (part.name, part.distribution, part.version, part.options) == (name, distribution, "0.1.0", options)
    outputs = engine.generate(PROMPTS, GREEDY)
    plain = make_engine(tiny_path, device="cpu").generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_their_options_are_checked_by_their_own_models(
    installed: Path, tiny_path: Path, make_engine: Callable[..., Any]
) -> None:
    choices = {
        "scheduler": {"use": "shortest-job-first", "options": {"aging": 1.0}},
        "attention": {"use": "streaming", "options": {"window": 0}},
    }
    with pytest.raises(ConfigError) as caught:
        make_engine(tiny_path, device="cpu", config=choices)
    reasons = "\n".join(caught.value.reasons)
    assert "scheduler.options.aging: unknown key; did you mean 'ageing'?" in reasons
    assert re.search(r"attention\.options\.window: .*greater than or equal to 1", reasons)


def test_a_refusal_of_theirs_is_told_with_the_others(
    installed: Path, tiny_path: Path, make_engine: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match="reads K/V of the compute dtype float32 only, not int8"):
        make_engine(tiny_path, device="cpu", attention="streaming", kv_dtype="int8")


def test_an_engine_that_does_not_name_them_is_not_affected(
    site: Path, tiny_path: Path, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same parts, the same tokens, and nothing of theirs imported but the manifests."""
    before = make_engine(tiny_path, device="cpu")
    monkeypatch.syspath_prepend(str(site))
    try:
        after = make_engine(tiny_path, device="cpu")
        assert after.plan.parts == before.plan.parts
        expected = [output.token_ids for output in before.generate(PROMPTS, GREEDY)]
        assert [output.token_ids for output in after.generate(PROMPTS, GREEDY)] == expected
        verdicts = {
            candidate.name: candidate.verdict for decision in after.decisions for candidate in decision.candidates
        }
        assert verdicts["shortest-job-first"] == verdicts["streaming"] == "not allowed"
        theirs = {name for name in sys.modules if name.partition(".")[0] in PACKAGES}
        assert theirs == set(PACKAGES)
    finally:
        forget()


def test_one_that_is_broken_does_not_hurt_an_engine_that_does_not_name_it(
    site: Path, tiny_path: Path, tmp_path: Path, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "site"
    for file in site.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = broken / file.relative_to(site)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    manifest = broken / "shortest_job_first" / "__init__.py"
    manifest.write_text(manifest.read_text() + "\nraise RuntimeError('half an upgrade')\n")
    forget()
    monkeypatch.syspath_prepend(str(broken))
    try:
        engine = make_engine(tiny_path, device="cpu", attention="streaming")
        assert engine.plan.parts["scheduler"].name == "continuous"
        assert engine.plan.parts["attention"].name == "streaming"
        with pytest.raises(ConfigError, match="half an upgrade"):
            make_engine(tiny_path, device="cpu", scheduler="shortest-job-first")
    finally:
        forget()


def test_allowed_distributions_take_part_in_the_automatic_choice(
    installed: Path, tiny_path: Path, make_engine: Callable[..., Any]
) -> None:
    """By what they declare: the scheduler is for latency, and the backend, which is not exact, comes last."""
    allow = {"plugins.allow": list(EXAMPLES)}
    chosen = make_engine(tiny_path, device="cpu", objective="latency", **allow).plan.parts
    assert chosen["scheduler"].name == "shortest-job-first"
    assert chosen["attention"].name == "torch"
    assert make_engine(tiny_path, device="cpu", **allow).plan.parts["scheduler"].name == "continuous"


def test_check_and_lock_know_them(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in EXAMPLES:
        assert main(["plugins", "check", name]) == 0
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"model": "m", "scheduler": "shortest-job-first"}))
    capsys.readouterr()
    assert main(["plugins", "lock", "-c", str(config), "-o", str(tmp_path / "pegboard.lock"), "--json"]) == 0
    locked = {found["name"]: found for found in json.loads(capsys.readouterr().out)["distribution"]}
    assert set(locked) == {"pegboard", "shortest-job-first"}
    assert locked["shortest-job-first"]["contracts"] == {"scheduler": 1}


CONFIG = """
model = "{model}"
device = "cpu"
scheduler = "shortest-job-first"
attention = "streaming"

[plugins]
allow = ["shortest-job-first"]
{lock}
"""


def explained(text: str) -> dict[str, dict[str, tuple[str, str]]]:
    """`plugins explain --json`: config field -> part -> (verdict, its reasons)."""
    return {
        decision["where"]: {c["name"]: (c["verdict"], "; ".join(c["reasons"])) for c in decision["candidates"]}
        for decision in json.loads(text)["decisions"]
    }


def check_explanation(found: dict[str, dict[str, tuple[str, str]]]) -> None:
    """Both are chosen, and of every other part it says why it lost."""
    assert found["scheduler"]["shortest-job-first"] == ("chosen", "")
    assert found["attention"]["streaming"] == found["decode_attention"]["streaming"] == ("chosen", "")
    assert found["scheduler"]["continuous"] == ("eligible", "the config names 'shortest-job-first'")
    assert found["attention"]["torch"] == ("eligible", "the config names 'streaming'")
    for candidates in found.values():
        assert all(reasons for verdict, reasons in candidates.values() if verdict != "chosen"), candidates


MISSING = (
    r"scheduler = 'shortest-job-first': no scheduler named 'shortest-job-first'.*valid names: continuous, static; "
    r"install the distribution that provides it"
)
HOW_TO_GET = "no installed distribution 'shortest-job-first' offers plugins.*`pip install shortest-job-first`"


def test_explained_used_and_missed_when_uninstalled(
    site: Path, tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a fresh environment (below), by the commands' own code."""
    here = tmp_path / "site"
    shutil.copytree(site, here, ignore=shutil.ignore_patterns("__pycache__"))
    forget()
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.chdir(tmp_path)
    plain, locked = tmp_path / "engine.toml", tmp_path / "locked.toml"
    plain.write_text(CONFIG.format(model=tiny_path, lock=""))
    locked.write_text(CONFIG.format(model=tiny_path, lock='lock = "pegboard.lock"'))
    try:
        assert main(["plugins", "lock", "-c", str(plain)]) == 0
        capsys.readouterr()
        assert main(["plugins", "explain", str(plain), "--json"]) == 0
        check_explanation(explained(capsys.readouterr().out))
        with Engine.from_config(locked) as engine:
            assert [len(output.token_ids) for output in engine.generate(PROMPTS, GREEDY)] == [6, 6]
        for path in (*here.glob("shortest_job_first-*"), here / "shortest_job_first"):
            shutil.rmtree(path)
        forget()
        importlib.invalidate_caches()
        with pytest.raises(ConfigError) as caught:
            Engine.from_config(plain)
        reasons = "\n".join(caught.value.reasons)
        assert re.search(MISSING, reasons)
        assert re.search(HOW_TO_GET, reasons)
        with pytest.raises(ConfigError, match=r"shortest-job-first 0\.1\.0 is locked and not installed: `pip install"):
            Engine.from_config(locked)
        assert main(["plugins", "explain", str(plain), "--json"]) == 0
        verdict, reason = explained(capsys.readouterr().out)["scheduler"]["shortest-job-first"]
        assert verdict == "refused"
        assert "install the distribution that provides it" in reason
        with Engine(tiny_path, device="cpu", attention="streaming") as engine:
            assert engine.generate(PROMPTS, GREEDY)[0].finish_reason == "length"
    finally:
        forget()


@pytest.mark.long
def test_their_own_tests_pass(site: Path) -> None:
    folder = ROOT / "examples" / "third_party"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTEST_ADDOPTS", "PEGBOARD_FULL")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), environment.get("PYTHONPATH", "")]))
    options = ["-v", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={folder}"]
    if not os.environ.get("PEGBOARD_FULL"):  # the slowest; the fresh environment below runs everything
        options += ["-k", "not test_random_use and not test_many_cancels"]
    command = [sys.executable, "-m", "pytest", *options, *(str(folder / name / "tests") for name in EXAMPLES)]
    done = subprocess.run(
        command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for package in PACKAGES:
        assert len(re.findall(rf"test_{package}\.py::.* PASSED", done.stdout)) > 60, package


@pytest.mark.full
def test_third_party_in_a_fresh_environment(tmp_path: Path, tiny_text_model: Path) -> None:
    """Installed by pip beside a wheel of pegboard: listed, checked, explained, used, their tests pass; and missed, with
    a word on how to get it back, when one is uninstalled."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "PEGBOARD_FULL"))}

    def run(*command: str, cwd: Path = tmp_path, timeout: int = 1800, code: int = 0) -> str:
        done = subprocess.run(
            [str(venv / "bin" / command[0]), *command[1:]],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr * bool(code)

    install = ["python", "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    folders = [ROOT / "examples" / "third_party" / name for name in EXAMPLES]
    run(*install, str(ROOT), *map(str, folders), "pytest", "hypothesis")
    listed = {part["name"]: part for part in json.loads(run("pegboard", "plugins", "list", "--json"))["parts"]}
    for folder, (distribution, (_, name, _)) in zip(folders, EXAMPLES.items(), strict=True):
        assert listed[name]["distribution"] == distribution
        assert run("pegboard", "plugins", "check", distribution).startswith("ok")
        out = run("pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
        assert "passed" in out
        assert "failed" not in out
    locked = json.loads(run("pegboard", "plugins", "lock", "--json"))["distribution"]
    assert {found["name"]: found["editable"] for found in locked} == {"pegboard": False} | dict.fromkeys(
        EXAMPLES, False
    )
    config = tmp_path / "engine.toml"
    config.write_text(CONFIG.format(model=tiny_text_model, lock=""))
    check_explanation(explained(run("pegboard", "plugins", "explain", str(config), "--json")))
    ask = ["pegboard", "generate", "-c", str(config), "--prompt", "one", "--max-tokens", "5", "--json"]
    assert json.loads(run(*ask))["metrics"]["output_tokens"] >= 1
    run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "shortest-job-first")
    for command in (ask, ["pegboard", "config", "check", str(config)]):
        said = run(*command, code=2)
        assert re.search(MISSING, said)
        assert re.search(HOW_TO_GET, said)
        assert "Traceback" not in said
    other = [*ask, "--set", "scheduler=auto", "--set", "plugins.allow=[]"]
    assert json.loads(run(*other))["metrics"]["output_tokens"] >= 1
