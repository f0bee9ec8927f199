"""A draft model beside its target and on another device.

    python benchmarks/pipelining.py

The target is a random Llama of 16 layers, 3.5 billion parameters, of which all layers behind the first add nothing:
they take their time, and the target says what its first layer says. That layer, with the same embedding and head and
some noise on its weights, is the draft: how often both agree is a matter of the noise. One request at a time, sampled,
always with all drafts.

    plain      no draft model
    beside     on the target's device, in its recorded steps
    apart      on a second device, nothing drafted ahead
    pipelined  on a second device, drafting on while the target verifies

`gain`: time of a token in the plain engine over that of the arm. `match`: whether the tokens are those of the plain
engine, which rounding may part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_timing import print_table, write_results
from safetensors.torch import save_file
from torch import Tensor

from pegboard import Engine, SamplingParams

LAYERS, SIZE, INNER, HEADS, KV_HEADS, VOCAB = 16, 4096, 11008, 32, 8, 32000
HEAD_SIZE = SIZE // HEADS
SHAPES = {
    "self_attn.q_proj": (SIZE, SIZE),
    "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, SIZE),
    "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, SIZE),
    "self_attn.o_proj": (SIZE, SIZE),
    "mlp.gate_proj": (INNER, SIZE),
    "mlp.up_proj": (INNER, SIZE),
    "mlp.down_proj": (SIZE, INNER),
}
NOISES = (0.0, 0.02, 0.06)


def layer(index: int, *, silent: bool) -> Iterator[tuple[str, Tensor]]:
    for name, shape in SHAPES.items():
        ends = name.endswith(("o_proj", "down_proj"))
        weight = torch.zeros(shape) if silent and ends else torch.randn(shape) * 0.03
        yield f"model.layers.{index}.{name}.weight", weight
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.{index}.{norm}.weight", torch.ones(SIZE)


def write(folder: Path, tensors: dict[str, Tensor], layers: int) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.to("cpu", torch.bfloat16) for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def make_models(root: Path) -> tuple[Path, list[Path]]:
    """The target, and a draft for each of NOISES."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        ends = {
            "model.embed_tokens.weight": torch.randn(VOCAB, SIZE) * 0.5,
            "model.norm.weight": torch.ones(SIZE),
            "lm_head.weight": torch.randn(VOCAB, SIZE) * 0.04,
        }
        first = dict(layer(0, silent=False))
        rest = {name: x for index in range(1, LAYERS) for name, x in layer(index, silent=True)}
        target = write(root / "target", {**ends, **first, **rest}, LAYERS)
        drafts = []
        for noise in NOISES:
            noisy = {name: x * (1 + noise * torch.randn(x.shape)) if x.dim() > 1 else x for name, x in first.items()}
            drafts.append(write(root / f"draft-{noise}", {**ends, **noisy}, 1))
    return target, drafts


def measure(target: Path, prompts: Sequence[list[int]], tokens: int, **settings: Any) -> dict[str, Any]:
    """Of an engine with these settings: ids, median milliseconds of a token, tokens a step keeps."""
    times: list[float] = []
    with Engine(target, device="cuda", max_rows=2, max_length=1024, kv_memory="1GiB", **settings) as engine:
        sampling = SamplingParams(temperature=0.2, seed=7, max_tokens=tokens, ignore_eos=True)
        # In the first turn kernels compile, and steps are recorded
        for turn, prompt in enumerate([prompts[0], *prompts]):
            output = engine.generate([prompt], sampling)[0].raise_for_error()
            if turn:
                times.append(1e3 * (output.metrics.itl or 0.0))
        stats = engine.stats().speculation
    return {"ids": output.token_ids, "ms": statistics.median(times), "kept": stats and stats.mean_length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    asked = parser.parse_args()
    prompts = [[1, *range(100 + 50 * index, 130 + 50 * index)] for index in range(asked.prompts)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        target, drafts = make_models(Path(folder))
        torch.cuda.empty_cache()
        plain = measure(target, prompts, asked.tokens)
        rows.append({"arm": "plain", "ms a token": plain["ms"]})
        for noise, draft in zip(NOISES, drafts, strict=True):
            for arm in ("beside", "apart", "pipelined"):
                options = {"model": str(draft), "drafts": asked.drafts}
                options |= {} if arm == "beside" else {"device": "cuda:1"}
                speculator = {"use": "draft_model", "options": options}
                adjusted = "pegboard_sampling.speculation.pace.adjusted"
                with mock.patch(adjusted, return_value=0) if arm == "apart" else nullcontext():
                    found = measure(target, prompts, asked.tokens, speculator=speculator, adapt_drafts=False)
                rows.append(
                    {
                        "arm": arm,
                        "noise": noise,
                        "ms a token": found["ms"],
                        "tokens a step": found["kept"],
                        "gain": plain["ms"] / found["ms"],
                        "match": "yes" if found["ids"] == plain["ids"] else "no",
                    }
                )
    print_table(rows)
    print(write_results("pipelining", rows, asked.results))


if __name__ == "__main__":
    main()
