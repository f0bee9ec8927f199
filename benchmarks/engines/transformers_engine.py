"""transformers' part of `benchmarks/cpu.py`: `generate` in float32, a batch padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from timing import measure, read_job
from transformers import AutoConfig, AutoModelForCausalLM

from pegboard.checkpoints.gguf import GGUFCheckpoint


def load(path: Path) -> torch.nn.Module:
    """The GGUF file's weights in a model of transformers' own, whose reader of GGUF needs a further package."""
    checkpoint = GGUFCheckpoint.open(path)
    config = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config), dtype=torch.float32).eval()
    weights = {name: checkpoint.read(name, dtype="float32").clone() for name in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the file does not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    checkpoint.close()
    return model


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    model = load(Path(job["model"]))

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
        )
        return found[:, width:].tolist()

    measure(job, generate, {"transformers": transformers.__version__, "torch": str(torch.__version__)})


if __name__ == "__main__":
    main()
