"""Every way in which an installed plugin may be broken: what an engine that names it does (docs/plugins.md, "When a
plugin misbehaves"), and that an engine of other parts, found by the same discovery, does not feel it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import ConfigError, EngineDead, PegboardError, PluginError, SamplingParams

Install = Callable[..., str]
Make = Callable[..., Any]

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPT = [3, 5, 7, 11]

MANIFEST = """
@hookimpl
def pegboard_parts():
    return [Part(role="attention", name="theirs", factory="{module}:Theirs", summary="Theirs")]
"""

#: Their backend: the reference, with one method that is wrong.
BACKEND = (
    "from pegboard.testing import isolated_registry\n"
    "Reference = isolated_registry().get('attention', 'torch').load()\n" + MANIFEST + "\nclass Theirs(Reference):\n"
)


def method(text: str) -> str:
    return BACKEND + "".join(f"    {line}\n" for line in text.splitlines())


#: What is wrong -> the plugin's source, and what the error of a config that names its part says.
AT_ASSEMBLY = {
    "import error": ("import not_installed_anywhere" + MANIFEST, "No module named 'not_installed_anywhere'"),
    "exit at import": ("raise SystemExit(4)", "SystemExit: 4"),
    "misspelt hook": (
        MANIFEST.replace("pegboard_parts", "pegboard_prats"),
        "unknown hook 'pegboard_prats'; did you mean 'pegboard_parts'?",
    ),
    "hook with arguments": (MANIFEST.replace("parts()", "parts(config)"), "Argument(s) {'config'}"),
    "hook that raises": (MANIFEST.replace("return [", "raise KeyError('k')\n    return ["), "KeyError: 'k'"),
    "hook that returns something else": (MANIFEST.replace("return [", "return {}, ["), "returned dict at index 0"),
    "contract version from the future": (
        MANIFEST.replace("summary=", "contract=99, summary="),
        "offers version 99 of the attention contract, this pegboard wants 1",
    ),
    "factory that is not there": (MANIFEST, "no 'Theirs' in"),
    "factory whose import fails": (MANIFEST.replace("{module}:", "not_there_at_all:"), "No module named 'not_there"),
    "factory that is no class of the role": (MANIFEST + "\nclass Theirs: pass\n", "class method refusals of Attention"),
    "method left out": (
        MANIFEST
        + "\nfrom pegboard.contracts.attention import AttentionBackend\nclass Theirs(AttentionBackend): pass\n",
        "is not implemented",
    ),
    "wrong signature of create": (
        method("@classmethod\ndef create(cls, options):\n    return cls()"),
        "create can't be called as create(need, options)",
    ),
    "wrong signature of plan": (method("def plan(self):\n    return None"), "plan can't be called as plan(self, "),
    "wrong signature of forward": (
        method("def forward(self, q):\n    return q"),
        "forward can't be called as forward(",
    ),
    "refusals that raises": (
        method("@classmethod\ndef refusals(cls, need, options):\n    return [][0]"),
        "its refusals() raised IndexError",
    ),
    "refusals that returns something else": (
        method("@classmethod\ndef refusals(cls, need, options):\n    return None"),
        "its refusals() returned None, not a list of texts",
    ),
    "create that raises": (
        method("@classmethod\ndef create(cls, need, options):\n    raise ValueError('no such kernel')"),
        "create raised ValueError: no such kernel",
    ),
    "create that exits": (
        method("@classmethod\ndef create(cls, need, options):\n    raise SystemExit(2)"),
        "create raised SystemExit: 2",
    ),
    "create that returns nothing": (
        method("@classmethod\ndef create(cls, need, options):\n    return None"),
        "create returned NoneType, which is no attention: it lacks forward, plan",
    ),
    "layouts that raises": (
        method("@classmethod\ndef layouts(cls, need, layer, options):\n    raise KeyError('nhd')"),
        "layouts raised KeyError: 'nhd'",
    ),
    "layouts that returns something else": (
        method("@classmethod\ndef layouts(cls, need, layer, options):\n    return None"),
        "layouts returned None, not a list of KVLayout",
    ),
}

#: What is wrong -> the source, and what the request's error says. The engine goes on.
IN_A_STEP = {
    "plan that raises": ("def plan(self, *args, **kwargs):\n    raise ZeroDivisionError('in plan')", "in plan"),
    "forward that raises": ("def forward(self, *args, **kwargs):\n    raise OSError('in forward')", "in forward"),
    "forward that returns nothing": ("def forward(self, *args, **kwargs):\n    return None", "NoneType"),
    "forward that returns another shape": (
        "def forward(self, q, *args, **kwargs):\n    return q[:, :1]",
        r"forward returned \[4, 1, 16\] for q \[4, 4, 16\]",
    ),
}


@pytest.fixture
def expected(tiny_path: Path, make_engine: Make) -> tuple[int, ...]:
    """What an engine of Pegboard's own parts says before the broken plugin is installed."""
    return ids(make_engine(tiny_path, device="cpu"))


def ids(engine: Any) -> tuple[int, ...]:
    [output] = engine.generate([PROMPT], GREEDY)
    return tuple(output.raise_for_error().token_ids)


@pytest.mark.parametrize("what", AT_ASSEMBLY)
def test_a_config_that_names_it_is_refused_and_no_other(
    what: str, install: Install, tiny_path: Path, make_engine: Make, expected: tuple[int, ...]
) -> None:
    source, said = AT_ASSEMBLY[what]
    install("theirs-dist", source, plugin="theirs-plugin")
    with pytest.raises(PegboardError, match=re.escape(said)) as caught:
        make_engine(tiny_path, device="cpu", attention="theirs")
    assert isinstance(caught.value, ConfigError | PluginError)
    assert "theirs-dist" in str(caught.value), "the message does not say whose fault it is"
    assert ids(make_engine(tiny_path, device="cpu")) == expected


@pytest.mark.parametrize("what", AT_ASSEMBLY)
def test_the_automatic_choice_of_an_engine_that_allows_it(
    what: str, install: Install, tiny_path: Path, make_engine: Make, expected: tuple[int, ...]
) -> None:
    """Allowed, it comes last by priority: nothing of it is needed."""
    install("theirs-dist", AT_ASSEMBLY[what][0].replace("summary=", "priority=-9, summary="))
    assert ids(make_engine(tiny_path, device="cpu", **{"plugins.allow": ["theirs-dist"]})) == expected


@pytest.mark.parametrize("what", IN_A_STEP)
def test_one_that_fails_in_a_step_ends_that_steps_requests_only(
    what: str, install: Install, tiny_path: Path, make_engine: Make, expected: tuple[int, ...]
) -> None:
    source, said = IN_A_STEP[what]
    install("theirs-dist", method(source))
    engine, other = make_engine(tiny_path, device="cpu", attention="theirs"), make_engine(tiny_path, device="cpu")
    for _ in range(2):  # its pages came back, and it takes the next
        [output] = engine.generate([PROMPT], GREEDY)
        assert output.finish_reason == "error"
        assert re.search(said, str(output.error))
        assert ids(other) == expected
    assert engine.stats().running == engine.stats().waiting == 0


def test_one_that_exits_in_a_step_ends_its_own_engine_only(
    install: Install, tiny_path: Path, make_engine: Make, expected: tuple[int, ...]
) -> None:
    install("theirs-dist", method("def forward(self, *args, **kwargs):\n    raise SystemExit(7)"))
    engine, other = make_engine(tiny_path, device="cpu", attention="theirs"), make_engine(tiny_path, device="cpu")
    [output] = engine.generate([PROMPT], GREEDY)
    assert output.finish_reason == "error"
    assert "the engine died: SystemExit(7)" in str(output.error)
    with pytest.raises(EngineDead):
        engine.submit(PROMPT, GREEDY)
    assert ids(other) == expected


def test_a_name_that_two_offer_is_fatal_to_who_names_it_only(
    install: Install, tiny_path: Path, make_engine: Make, expected: tuple[int, ...]
) -> None:
    for distribution in ("first-dist", "second-dist"):
        install(distribution, MANIFEST)
    with pytest.raises(ConfigError, match=r"ambiguous: offered by .*first-dist 1\.0 and .*second-dist 1\.0"):
        make_engine(tiny_path, device="cpu", attention="theirs")
    assert ids(make_engine(tiny_path, device="cpu")) == expected


def test_a_squatter_on_a_name_of_ours_does_not_get_the_automatic_choice(
    install: Install, tiny_path: Path, make_engine: Make, expected: tuple[int, ...]
) -> None:
    install("squatter", MANIFEST.replace("theirs", "torch").replace("summary=", "priority=1000, summary="))
    assert ids(make_engine(tiny_path, device="cpu")) == expected
    with pytest.raises(ConfigError, match="ambiguous"):
        make_engine(tiny_path, device="cpu", attention="torch")


def test_a_slow_manifest_is_told_and_works(
    install: Install,
    tiny_path: Path,
    make_engine: Make,
    expected: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pegboard.registry.discovery.SLOW_SECONDS", 0.05)
    install("slow-dist", "import time\ntime.sleep(0.1)\n" + method("pass"))
    with caplog.at_level(logging.WARNING, "pegboard"):
        assert ids(make_engine(tiny_path, device="cpu")) == expected
    assert re.search(r"manifest of .*slow-dist 1\.0 took 0\.\d s to import; it must be light", caplog.text)
    assert ids(make_engine(tiny_path, device="cpu", attention="theirs")) == expected
