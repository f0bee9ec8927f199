"""vLLM's part of `benchmarks/cpu.py`: its CPU build, float32, no prefix cache. Reads the folder `job["folder"]`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from timing import SHORT, measure, read_job

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    job = read_job()
    longest = max(map(len, [*job["texts"], *(prompt for group in job["prefill"] for prompt in group)]))
    engine = LLM(
        model=job["folder"],
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=longest + SHORT + job["tokens"],
        max_num_seqs=8,
        **job.get("engine", {}),
    )

    def generate(prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in engine.generate(asked, sampling, use_tqdm=False)]

    measure(job, generate, {"vllm": vllm.__version__, "torch": str(torch.__version__)})


if __name__ == "__main__":
    main()
