"""Quantizer `blocks-cpu` on GGUF files like those that are published: one type, or the mix of Q4_K_M and Q5_K_M."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("gguf")
pytest.importorskip("transformers")

from pegboard import Registry, SamplingParams
from pegboard.checkpoints.gguf import GGUFCheckpoint
from pegboard.hub import resolve_model
from pegboard.quantizing.perplexity import perplexity
from pegboard.testing.oracles.gguf_files import rewrite, write_llama
from pegboard.testing.tiny import tiny_model
from pegboard_cpu import manifest

LAYERS = 4
PROMPT = (1, 17, 42, 200, 3, 99, 99, 140, 7, 56, 23)


@pytest.fixture(scope="module")
def plugins() -> list[Any]:
    """The manifest, unless it is installed."""
    found = any(entry.part.name == "blocks-cpu" for entry in Registry.discover().parts("quantizer"))
    return [] if found else [manifest]


def storages(path: Path) -> Counter[str]:
    checkpoint = GGUFCheckpoint.open(path)
    found = Counter(info.storage for info in checkpoint.tensors().values() if len(info.shape) == 2)
    checkpoint.close()
    return found


def logprobs(engine: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    """[len(prompt) - 1] of the prompt's own tokens."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = engine.generate([list(prompt)], scored)[0].raise_for_error()
    return torch.tensor([record.logprob for record in output.prompt_logprobs])


@pytest.mark.supports(
    "Numbers", "GGUF files of Q4_K_M, Q5_K_M, Q6_K and of Q5_0, Q5_1, packed on a CPU (quantizer blocks-cpu)"
)
@pytest.mark.parametrize(("kind", "hidden"), [("Q4_K_M", 512), ("Q5_K_M", 768), ("Q6_K", 512), ("Q5_0", 96)])
def test_a_file_means_what_transformers_reads(
    kind: str,
    hidden: int,
    tmp_path: Path,
    make_engine: Callable[..., Any],
    plugins: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Log probabilities of the dequantised model in float32, but for rounded activations; nothing becomes dense."""
    from transformers import AutoModelForCausalLM

    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 96 if hidden % 96 == 0 else 4}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": LAYERS}
    folder = tiny_model(tmp_path / "hf", std=0.05, **sizes, **heads)
    path = write_llama(folder, tmp_path / "m.gguf", kind)
    found = storages(path)
    if kind.endswith("_M"):
        # Values and the last matrix of half of the layers, embedding and head
        assert found == {"Q6_K": 2 * 2 + 2, kind.removesuffix("_M"): 7 * LAYERS - 4}
    else:
        assert set(found) == {kind}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    exact = logits[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    settings: dict[str, Any] = {"device": "cpu", "max_length": 64, "plugins": plugins}
    with caplog.at_level("WARNING", logger="pegboard"):
        engine = make_engine(path, quantizer="blocks-cpu", **settings)
    assert "dequantised" not in caplog.text
    dense = logprobs(make_engine(path, quantizer="none", **settings), PROMPT)
    torch.testing.assert_close(dense, exact, rtol=0, atol=1e-4)
    error = (logprobs(engine, PROMPT) - exact).norm() / (exact - exact.mean()).norm()
    assert error < 0.06  # rounding to 127 steps, through so many layers; a wrong matrix makes it 1
    # Rows of a step do not change each other
    prompts = [[5, 6, 7], list(range(40, 56)), [9] * 12]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    alone = [engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in engine.generate(prompts, sampling)] == alone


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_the_real_model(
    kind: str, tmp_path: Path, make_engine: Callable[..., Any], plugins: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden size 576 is no multiple of 256: as in published files, Q5_0 and Q8_0 stand in for K types there."""
    path = rewrite(resolve_model("smollm2-135m-instruct"), tmp_path / "m.gguf", kind)
    mixed = {"Q4_K_M": {"Q5_0", "Q4_K"}, "Q5_K_M": {"Q5_1", "Q5_K"}, "Q6_K": set()}
    assert set(storages(path)) == mixed[kind] | {"Q8_0", "Q6_K"}
    settings: dict[str, Any] = {"device": "cpu", "max_length": 256, "max_rows": 4, "plugins": plugins}
    with caplog.at_level("WARNING", logger="pegboard"):
        engine = make_engine(path, quantizer="blocks-cpu", **settings)
    assert "dequantised" not in caplog.text
    message = [{"role": "user", "content": "Count from 1 to 20."}]
    counted = engine.chat(message, SamplingParams(temperature=0.0, max_tokens=48))
    if kind != "Q5_K_M":  # the dequantised model of these blocks counts otherwise
        assert "5. 5" in counted.text
    texts = [list(counted.token_ids), list(range(1000, 1064))]
    dense = make_engine(path, quantizer="none", **settings)
    assert perplexity(engine, texts) == pytest.approx(perplexity(dense, texts), rel=0.05)
    assert engine.plan.memory.weights < dense.plan.memory.weights / 2
