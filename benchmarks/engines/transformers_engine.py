"""transformers' part of `benchmarks/cpu.py`: `generate` in float32, a batch padded on the left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from timing import measure, read_job
from transformers import AutoModelForCausalLM


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()

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
