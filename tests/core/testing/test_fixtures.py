"""Isolated engines, parts that fail on purpose, tiny models of every architecture, the pytest fixtures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine, Part, PluginError, Registry, SamplingParams, hookimpl
from pegboard.contracts.checkpoint import TokenizerFiles
from pegboard.testing.clock import FakeClock
from pegboard.testing.engines import IsolatedEngine, isolated_engine, isolated_registry
from pegboard.testing.faulty import PLACES, Faults, Hit
from pegboard.testing.pytest_plugin import fake_clock, make_isolated_engine, tiny_model_path  # noqa: F401
from pegboard.testing.tiny import ARCHITECTURES, tiny_model, write_tokenizer
from pegboard.text import load_tokenizer
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [3, 3, 3]]

MANIFEST = """
from pegboard import Part, hookimpl

@hookimpl
def pegboard_parts():
    return [Part(role="scheduler", name="{name}", factory="pegboard_scheduling.continuous:ContinuousScheduler",
                 options="pegboard_scheduling.options:ContinuousOptions", summary="from elsewhere", priority=1000)]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """install(distribution, manifest text): as pip would, with an entry point."""

    def put(name: str, text: str | None = None) -> None:
        site, module = tmp_path / f"site-{name}", name.replace("-", "_") + "_manifest"
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pegboard]\n{name} = {module}\n")
        (site / f"{module}.py").write_text(MANIFEST.format(name=name) if text is None else text)
        monkeypatch.syspath_prepend(str(site))

    return put


class Mine:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [
            Part(role="scheduler", name="mine", factory=ContinuousScheduler, options=ContinuousOptions, summary="mine")
        ]


# -- isolation


@pytest.mark.supports("Engine", "engines that don't see what else is installed, for tests")
def test_what_else_is_installed_is_not_seen(install: Callable[..., None], tiny_path: Path) -> None:
    install("some-dist")
    install("broken-dist", "raise RuntimeError('at import')")
    seen = {entry.distribution for entry in Registry.discover().parts("scheduler")}
    assert "some-dist" in seen, "it is installed"
    registry = isolated_registry()
    assert {entry.distribution for entry in registry.parts("scheduler")} == {"pegboard"}
    assert registry.broken == ()
    with isolated_engine(tiny_path) as engine:
        assert engine.plan.parts["scheduler"].name == "continuous"
    with pytest.raises(ConfigError, match="some-dist"), isolated_engine(tiny_path, scheduler="some-dist"):
        pass


def test_named_distributions_are_seen_and_may_be_chosen(install: Callable[..., None], tiny_path: Path) -> None:
    install("some-dist")
    install("other-dist")
    with isolated_engine(tiny_path, plugins=["Some_Dist"]) as engine:
        assert engine.plan.parts["scheduler"].distribution == "some-dist"
    with isolated_engine(tiny_path, plugins=["some-dist", Mine()], scheduler="mine") as engine:
        assert engine.plan.parts["scheduler"].name == "mine"
        assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    with pytest.raises(PluginError, match="no installed distribution 'absent-dist' offers plugins"):
        IsolatedEngine(tiny_path, plugins=["absent-dist"])


def test_an_isolated_engine_gives_what_others_give_and_is_closed(tiny_path: Path, make_engine: Any) -> None:
    right = [output.token_ids for output in make_engine(tiny_path, device="cpu").generate(PROMPTS, GREEDY)]
    before = threading.active_count()
    with isolated_engine(tiny_path) as engine:
        assert isinstance(engine, Engine)
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == right
    assert threading.active_count() == before


def test_the_pytest_fixtures(
    make_isolated_engine: Callable[..., Any],  # noqa: F811
    tiny_model_path: Path,  # noqa: F811
    fake_clock: FakeClock,  # noqa: F811
) -> None:
    first, second = make_isolated_engine(), make_isolated_engine(tiny_model_path, max_rows=2)
    assert first.generate("hello", GREEDY).text == second.generate("hello", GREEDY).text
    assert len(first.chat([{"role": "user", "content": "hello"}], GREEDY).token_ids) == 6
    fake_clock.advance(2.5)
    assert fake_clock() == 2.5
    with pytest.raises(ValueError, match="does not go back"):
        fake_clock.advance(-1)


# -- faults


@pytest.fixture(scope="module")
def right(tiny_path: Path) -> list[tuple[int, ...]]:
    with isolated_engine(tiny_path) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


#: A phase that the engine calls in every step, in each place; and one that it calls before any.
PHASES = [
    "attention.forward",
    "decode_attention.plan",
    "cache.reserve",
    "scheduler.schedule",
    "sampler.sample",
    "ops.rope_write",
    "executor.launch",
    "model.forward",
]


@pytest.mark.supports("Engine", "faults put into any phase of any part, for tests of apps")
@pytest.mark.parametrize("where", PHASES)
def test_a_fault_in_any_phase_ends_requests_and_not_the_engine(
    tiny_path: Path, right: list[tuple[int, ...]], where: str
) -> None:
    faults = Faults()
    faults.fail(where, call=3, error=ValueError("on purpose"))
    with isolated_engine(tiny_path, plugins=[faults], **faults.settings) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        failed = [output for output in outputs if output.error is not None]
        assert failed
        assert all("on purpose" in str(output.error) for output in failed)
        assert faults.hits == (Hit(where=where, call=3),)
        assert faults.calls(where) >= 3
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == right
    assert set(faults.settings) <= {where.partition(".")[0]}


@pytest.mark.parametrize("where", ["checkpoint.read", "quantizer.linear"])
def test_a_fault_while_loading_is_told_at_once(tiny_path: Path, where: str) -> None:
    faults = Faults()
    faults.fail(where, call=4, error=OSError("the disk is gone"))
    with (
        pytest.raises(OSError, match="the disk is gone"),
        isolated_engine(tiny_path, plugins=[faults], **faults.settings),
    ):
        pass


def test_nan_ends_the_row_and_names_it(tiny_path: Path, right: list[tuple[int, ...]]) -> None:
    faults = Faults()
    faults.spoil("model.logits", call=2)
    with isolated_engine(tiny_path, plugins=[faults], max_rows=1) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert "NaN" in str(outputs[0].error)
        assert [output.token_ids for output in outputs[1:]] == right[1:]


def test_nan_where_there_is_no_number_is_an_error(tiny_path: Path) -> None:
    faults = Faults()
    faults.spoil("cache.reserve")
    with isolated_engine(tiny_path, plugins=[faults], **faults.settings) as engine:
        output = engine.generate(PROMPTS[:1], GREEDY)[0]
        assert "cache.reserve returned bool, in which nothing can be NaN" in str(output.error)


def test_a_delay_is_waited_for(tiny_path: Path, right: list[tuple[int, ...]]) -> None:
    faults = Faults()
    faults.delay("executor.launch", seconds=0.1, call=2, times=3)
    with isolated_engine(tiny_path, plugins=[faults], **faults.settings) as engine:
        start = time.monotonic()
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == right
        assert time.monotonic() - start >= 0.3
        assert [hit.call for hit in faults.hits] == [2, 3, 4]


def test_faults_that_last_and_counting_anew(tiny_path: Path, right: list[tuple[int, ...]]) -> None:
    faults = Faults()
    faults.fail("sampler.sample", call=7, times=None)
    with isolated_engine(tiny_path, plugins=[faults], **faults.settings) as engine:
        assert [output.token_ids for output in engine.generate(PROMPTS[:1], GREEDY)] == right[:1]
        faults.reset()
        assert (faults.hits, faults.calls("sampler.sample")) == ((), 0)
        assert [output.token_ids for output in engine.generate(PROMPTS[:1], GREEDY)] == right[:1]
        for _ in range(2):
            assert all(output.error is not None for output in engine.generate(PROMPTS[:1], GREEDY))


def test_another_part_than_pegboards_own_can_be_made_to_fail(tiny_path: Path) -> None:
    class Own(ContinuousScheduler):
        """Somebody's scheduler."""

    faults = Faults()
    faults.wrap("scheduler", Own, ContinuousOptions)
    faults.fail("scheduler.commit", call=2)
    with isolated_engine(tiny_path, plugins=[faults], **faults.settings) as engine:
        assert "injected fault in scheduler.commit" in str(engine.generate(PROMPTS[:1], GREEDY)[0].error)
        assert isinstance(engine._phases.scheduler.inner, Own)


def test_wrong_faults_are_refused_by_name() -> None:
    faults = Faults()
    with pytest.raises(ValueError, match=r"sampler has no phase 'smaple'; phases: open, features, graph_key, sample"):
        faults.fail("sampler.smaple")
    with pytest.raises(ValueError, match=f"'speculator' is no place of a part; places: {', '.join(PLACES)}"):
        faults.fail("speculator.propose")
    with pytest.raises(ValueError, match="both count from 1"):
        faults.fail("sampler.sample", call=0)
    with pytest.raises(ValueError, match="-1 seconds"):
        faults.delay("sampler.sample", seconds=-1)


# -- tiny models


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_of_every_architecture_run(tmp_path: Path, architecture: str) -> None:
    """With a text prompt: they have a tokenizer. All architectures that Pegboard serves are there."""
    path = tiny_model(tmp_path / "m", architecture=architecture, num_hidden_layers=1)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size < 2 << 20
    with isolated_engine(path, max_length=64) as engine:
        output = engine.generate("the quick brown fox", GREEDY)
        assert output.text == engine._admission.tokenizer.decode(output.token_ids)
        assert engine.plan.vocab_limit == json.loads((path / "config.json").read_text())["vocab_size"]


def test_no_architecture_is_left_out() -> None:
    known = {name for entry in isolated_registry().parts("model") for name in entry.part.matches}
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {
        AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(architecture))].__name__
        for architecture in ARCHITECTURES
    }
    assert made == known


def test_a_tiny_model_is_the_same_every_time_and_another_with_another_seed(tmp_path: Path) -> None:
    first, second, other = (tiny_model(tmp_path / str(i), seed=i // 2) for i in range(3))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    bare = tiny_model(tmp_path / "bare", tokenizer=False)
    assert not (bare / "tokenizer.json").exists()


@pytest.mark.parametrize("size", [16, 100, 211, 259, 300, 2000])
def test_the_tokenizer_has_exactly_the_vocabulary(tmp_path: Path, size: int) -> None:
    write_tokenizer(tmp_path, size)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer = load_tokenizer(TokenizerFiles(tokenizer_json=tmp_path / "tokenizer.json", config=config))
    assert tokenizer.vocab_size == size
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    ids = tokenizer.encode("eat a tart")
    assert max(ids) < size
    if size >= 100:
        assert tokenizer.decode(ids) == "eat a tart"
    text = "Ünïcödé, 日本語 and 👩‍👩‍👧\n\ttabs"
    if size >= 259:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    if size >= 300:
        assert len(tokenizer.encode("the tea")) < len("the tea")
    assert all(tokenizer.token_text(id) is not None for id in range(size))


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 is the least"):
        write_tokenizer(tmp_path, 15)


def test_the_weights_are_readable_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tiny_model(tmp_path / "m", vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    assert ids.dtype == torch.int64
    assert tokenizer.decode(ids[0]) == "hello there"
