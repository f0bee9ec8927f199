"""`pegboard compare`: the first part that differs is found, whichever it is; equal ones agree; exit codes say which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pegboard import ConfigError, EngineConfig, InvalidRequest, Part, hookimpl, load_config
from pegboard.cli.main import main
from pegboard.comparing import Comparison, compare, read_prompts
from pegboard.comparing.errors import Errors, error_of
from pegboard.comparing.probe import Key
from pegboard.contracts.sampler import SampleOutput
from pegboard.ops import TorchOps
from pegboard.testing.tiny import tiny_model
from pegboard_attention.torch_backend import TorchAttention
from pegboard_sampling.torch_sampler import TorchSampler

Output = pytest.CaptureFixture[str]
PROMPTS = [[1, 17, 42, 200, 3], [9, 8, 7, *range(30, 70)]]
USED = {"device": "cpu", "attention": "torch", "ops": "torch", "sampler": "torch"}
#: Of the tiny model.
WIDTH, MLP, LAYERS = 64, 96, 3


class Offer:
    def __init__(self, role: str, factory: type) -> None:
        self._part = Part(role=role, name="odd", factory=factory, summary="for a test")

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [self._part]


class OddAttention(TorchAttention):
    """Wrong in decode steps of layer 1."""

    calls = 0

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().forward(*arguments, **named)
        if len(out) > 1:
            return out
        type(self).calls += 1
        return out * 1.02 if type(self).calls % LAYERS == 2 else out


class OddNorm(TorchOps):
    def norm(self, x: torch.Tensor, norm: Any, residual: Any = None) -> torch.Tensor:
        return super().norm(x, norm, residual) * 1.01

    def project(self, x: torch.Tensor, linear: Any, *, norm: Any = None, **others: Any) -> torch.Tensor:
        return super().project(x if norm is None else self.norm(x, norm), linear, **others)


class OddMLP(TorchOps):
    def project(self, x: torch.Tensor, linear: Any, **others: Any) -> torch.Tensor:
        return super().project(x, linear, **others) * (1.01 if linear.in_features == MLP else 1)


class OddOut(TorchOps):
    """The projection after attention."""

    def project(self, x: torch.Tensor, linear: Any, **others: Any) -> torch.Tensor:
        is_out = (linear.in_features, linear.out_features) == (WIDTH, WIDTH)
        return super().project(x, linear, **others) * (1.01 if is_out else 1)


class OddRope(TorchOps):
    def rope_write(self, qkv: Any, heads: Any, positions: Any, *others: Any) -> Any:
        return super().rope_write(qkv, heads, positions + 1, *others)


class OddHead(TorchOps):
    def project(self, x: torch.Tensor, linear: Any, **others: Any) -> torch.Tensor:
        out = super().project(x, linear, **others)
        return out * 1.01 if out.shape[1] == 211 else out


class OddSampler(TorchSampler):
    """Takes the second best at every seventh position."""

    def sample(self, logits: torch.Tensor, rows: Any) -> SampleOutput:
        best = super().sample(logits, rows).ids
        second = logits.topk(2).indices[:, 1]
        return SampleOutput(ids=torch.where(rows.positions % 7 == 0, second, best))


@pytest.fixture
def config(tiny_path: Path) -> Callable[..., EngineConfig]:
    def make(**settings: Any) -> EngineConfig:
        return load_config({"model": str(tiny_path), **USED, **settings})

    return make


def run(a: EngineConfig, b: EngineConfig, **options: Any) -> Comparison:
    return compare(a, b, PROMPTS, **({"max_tokens": 9, "repeats": 1} | options))


@pytest.mark.parametrize(
    ("role", "factory", "layer", "part", "name"),
    [
        ("decode_attention", OddAttention, 1, "attention", "attention"),
        ("ops", OddNorm, 0, "norm", "before self_attn.qkv_proj"),
        ("ops", OddMLP, 0, "mlp", "mlp.down_proj"),
        ("ops", OddOut, 0, "projection", "self_attn.o_proj"),
        ("ops", OddRope, 0, "rope", "q"),
        ("ops", OddHead, None, "logits", "logits"),
        ("sampler", OddSampler, None, "sampler", "sampler"),
    ],
)
def test_the_first_part_that_differs_is_named(
    config: Callable[..., EngineConfig], role: str, factory: Any, layer: int | None, part: str, name: str
) -> None:
    factory.calls = 0
    plugin = Offer(role.removeprefix("decode_"), factory)
    found = run(config(), config(**{role: "odd"}), plugins=[plugin])
    assert not found.agree
    assert found.first is not None
    assert (found.first.layer, found.first.part, found.first.name) == (layer, part, name)
    expected = {"attention": 0.02, "logits": 0.01, "norm": 0.01}.get(part)
    if expected is not None:
        assert found.first.relative == pytest.approx(expected, rel=1e-3)
    if part == "sampler":
        assert found.tokens.equal < 1
        # Positions of choices: 5 .. 13 and 43 .. 51; only 7 and 49 are sevenths
        assert found.first.relative == pytest.approx(1 / 9)
        assert found.tokens.first_difference == (0, 2)


@pytest.mark.supports("Engine", "comparing two configs part by part")
def test_equal_numbers_in_other_steps_agree(config: Callable[..., EngineConfig]) -> None:
    """Chunks and pages of other sizes: the same arithmetic in other pieces."""
    b = config(page_size=32, scheduler={"use": "continuous", "options": {"chunk": 3}}, shadow={"ops": "torch"})
    found = run(config(), b)
    assert found.agree
    assert found.first is None
    assert found.tokens.equal == 1
    assert found.tokens.tokens == 18
    assert found.tokens.first_difference is None
    assert {part.layer for part in found.parts} == {None, 0, 1, 2}
    kinds = {part.part for part in found.parts}
    assert kinds == {"embedding", "norm", "projection", "rope", "attention", "mlp", "logits", "sampler"}
    assert all(part.relative < 1e-4 for part in found.parts)
    assert found.speed_a.prefill > 0
    assert (found.speed_b.decode or 0) > 0


def test_the_error_is_that_of_the_dtype(config: Callable[..., EngineConfig]) -> None:
    found = run(config(dtype="float64"), config(dtype="float32"))
    assert found.tolerance == 1e-3, "the coarser dtype's"
    worst = max(part.relative for part in found.parts if part.part != "sampler")
    assert 1e-8 < worst < 1e-4
    assert not run(config(dtype="float64"), config(dtype="float32"), tolerance=1e-9).agree


def test_weights_of_8_bits_differ(config: Callable[..., EngineConfig]) -> None:
    found = run(config(), config(quantizer="int8-cpu"))
    assert found.first is not None
    assert (found.first.layer, found.first.part, found.first.name) == (0, "projection", "self_attn.qkv_proj")
    norms = [part.relative for part in found.parts if part.part == "norm" and part.layer == 0]
    assert norms[0] == 0, "nothing of 8 bits comes before it"


def test_samplers_with_noise_are_compared(config: Callable[..., EngineConfig]) -> None:
    same = run(config(), config(), temperature=1.0, seed=5)
    assert same.agree
    assert same.tokens.equal == 1
    odd = run(config(), config(sampler="odd"), temperature=1.0, seed=5, plugins=[Offer("sampler", OddSampler)])
    assert odd.first is not None
    assert odd.first.part == "sampler"


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    path = str(tiny_model(tmp_path / "m", architecture="mixtral", tokenizer=False))
    a, b = ({"model": path, "device": "cpu", "page_size": size} for size in (16, 32))
    found = run(load_config(a), load_config(b))
    assert found.agree
    assert any("experts" in part.name for part in found.parts if part.part == "mlp")


def test_long_prompts_are_kept_in_part(config: Callable[..., EngineConfig]) -> None:
    """Wrong in decode steps only, which are kept whatever the prompt's length."""
    OddAttention.calls = 0
    b, plugins = config(decode_attention="odd"), [Offer("attention", OddAttention)]
    found = run(config(), b, positions=2, plugins=plugins)
    assert found.first is not None
    assert found.first.layer == 1


def test_different_models_are_refused(config: Callable[..., EngineConfig], tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "m", num_hidden_layers=2, tokenizer=False)
    with pytest.raises(ConfigError, match="llama of 3 layers and 211 tokens, llama of 2 layers"):
        run(config(), config(model=str(other)))
    with pytest.raises(ConfigError, match="executor local only"):
        run(config(), config(executor="remote"))
    with pytest.raises(InvalidRequest, match="the prompt holds 999"):
        compare(config(), config(), [[999]])


# -- arithmetic


def test_errors_of_a_row() -> None:
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert error_of(a, a) == (0, 0)
    assert error_of(a, a + torch.tensor([[0.0, 0.5], [0.0, 0.0]])) == (0.5, pytest.approx(0.1))
    assert error_of(a, a[:1]) == (float("inf"), float("inf"))
    assert error_of(a, None)[1] == float("inf")
    assert error_of(a, a * torch.nan)[1] == float("inf")
    masked = torch.tensor([[1.0, -torch.inf]])
    assert error_of(masked, masked) == (0, 0)
    assert error_of(masked, torch.tensor([[1.0, 0.0]]))[1] == float("inf")


def test_a_choice_between_close_logits_is_a_tie() -> None:
    ids, other = torch.tensor([0]), torch.tensor([1])
    sampler, logits = Key(None, "sampler", "sampler"), Key(None, "logits", "logits")
    near = torch.tensor([[1.0, 0.99999, 0.0]])
    swapped = torch.tensor([[0.99999, 1.0, 0.0]])
    errors = Errors(1e-3, greedy=True)
    errors.add(0, {logits: near, sampler: ids}, {logits: swapped, sampler: other})
    assert errors.ties == 1
    assert not any(part.differs for part in errors.parts())
    errors = Errors(1e-3, greedy=True)
    errors.add(0, {logits: near, sampler: ids}, {logits: near, sampler: other})
    assert [part.part for part in errors.parts() if part.differs] == ["sampler"]


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Hello there\n\n[1, 2, 3]\n")
    assert read_prompts(file) == ["Hello there", [1, 2, 3]]
    file.write_text("Hello\n[1, 2\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="there is none"):
        read_prompts(file)
    with pytest.raises(ConfigError, match="missing"):
        read_prompts(tmp_path / "missing")


# -- the command


@pytest.fixture
def files(tiny_path: Path, tmp_path: Path) -> tuple[str, str]:
    for name, more in (("a", ""), ("b", 'quantizer = "int8-cpu"\n')):
        (tmp_path / f"{name}.toml").write_text(f'model = "{tiny_path}"\ndevice = "cpu"\n{more}')
    return str(tmp_path / "a.toml"), str(tmp_path / "b.toml")


def test_exit_codes_and_table(files: tuple[str, str], capsys: Output) -> None:
    a, b = files
    common = ["--ids", "1,17,42", "--max-tokens", "4", "--repeats", "1"]
    assert main(["compare", a, a, *common]) == 0
    assert "agree: no part differs by more than 0.001" in capsys.readouterr().out
    assert main(["compare", a, b, *common]) == 1
    text = capsys.readouterr().out
    assert "DIFFER first in layer 0, projection self_attn.qkv_proj (prompt 0)" in text
    assert "quantizer int8-cpu" in text
    assert [line.split()[0] for line in text.splitlines() if line[:1].isdigit()] == ["0", "1", "2"]
    assert "decode tokens/s" in text
    assert main(["compare", a, "--with", "page_size=32", *common, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["agree"] is True
    assert data["tokens"]["equal"] == 1.0
    assert msgspec.convert(data, Comparison).parts
    assert main(["compare", a, "--with", "quantizer=int8-cpu", "--tolerance", "10", *common]) == 0


def test_wrong_use(files: tuple[str, str], capsys: Output) -> None:
    a, b = files
    assert main(["compare", a]) == 2
    assert "--with" in capsys.readouterr().err
    assert main(["compare", a, b, "--ids", "1,x"]) == 2
    assert "'1,x' is no list of token ids" in capsys.readouterr().err
    assert main(["compare", a, b, "-p", "Hello"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_models_without_a_tokenizer_have_built_in_ids(files: tuple[str, str], capsys: Output) -> None:
    a, _ = files
    arguments = ["compare", a, "--with", "page_size=64", "--max-tokens", "1", "--repeats", "1", "--json"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tokens"]["prompts"] == 3
    assert data["speed_a"]["decode"] is None
