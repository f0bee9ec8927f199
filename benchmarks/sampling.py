"""The fused sampler beside a sort and a pass of argmax.

    python benchmarks/sampling.py

Logits are normal, three wide ("normal": top-p keeps thousands of tokens), or fall off like a language model's
("falling": hundreds). Works rotate over buffers so that the L2 is cold; `warm us` is one buffer again and again, as
after the head's product. `wrong`: choices that the definition in float64 doesn't allow, of those checked. `sort us` is
top-k and top-p by torch.sort (the kind of row doesn't matter to it), `argmax us` one pass over the same logits.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import READ_CEILING, copies_for, microseconds, print_table, write_results
from torch import Tensor

from pegboard.contracts.sampler import SamplerNeed, SampleRows, SamplingParams, SlotOpening
from pegboard.devices import device_facts
from pegboard.testing.oracles.sampling import choose
from pegboard_sampling.fused.sampler import FusedSampler

VOCAB = 128256
CHECKED = 6
KINDS: dict[str, dict[str, Any]] = {
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 200": {"top_k": 200},
    "penalties, top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9, "frequency_penalty": 0.5},
    "logprobs 5, top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9, "logprobs": 5},
}


def make_logits(form: str, rows: int, dtype: torch.dtype) -> Tensor:
    if form == "normal":
        return (torch.randn(rows, VOCAB, device="cuda") * 3).to(dtype)
    rank = torch.rand(rows, VOCAB, device="cuda").argsort(1).float()
    return (-1.3 * rank.add_(1.0).log_() + 0.3 * torch.randn(rows, VOCAB, device="cuda")).to(dtype)


def by_sort(logits: Tensor, top_k: int, top_p: float, noise: Tensor) -> Tensor:
    values, ids = logits.float().sort(dim=-1, descending=True)
    values[:, top_k:] = -torch.inf
    weights = values.softmax(-1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill(before >= top_p, 0.0)
    return ids.gather(1, (weights / noise).argmax(-1, keepdim=True))[:, 0]


def measure(kind: str, form: str, rows: int, dtype: torch.dtype, references: dict[Any, float]) -> dict[str, Any]:
    need = SamplerNeed(device=device_facts("cuda"), vocab_size=VOCAB, slots=rows, max_length=1000)
    sampler = FusedSampler.create(need, None)
    openings = [
        SlotOpening(
            slot=slot, sampling=SamplingParams(**KINDS[kind]), seed=slot, prompt=(1, 2), output=(3,), max_length=1000
        )
        for slot in range(rows)
    ]
    sampler.open(openings)
    size = rows * VOCAB * dtype.itemsize
    many = [make_logits(form, rows, dtype) for _ in range(copies_for(size, most=32))]
    step = SampleRows(
        slots=torch.arange(rows, device="cuda"),
        positions=torch.full((rows,), 9, device="cuda"),
        host_slots=tuple(range(rows)),
    )
    step = SampleRows(
        slots=step.slots, positions=step.positions, host_slots=step.host_slots, key=sampler.graph_key(step.host_slots)
    )
    ids = sampler.sample(many[0], step).ids.tolist()
    checked = range(0, rows, -(-rows // CHECKED))
    wrong = sum(bool(choose(many[0][row], openings[row], 9).problem(ids[row], 1e-4)) for row in checked)
    time = microseconds([partial(sampler.sample, x, step) for x in many])
    if (rows, dtype) not in references:
        noise = torch.empty(rows, VOCAB, device="cuda").exponential_()
        references[rows, dtype] = microseconds([partial(torch.argmax, x, -1) for x in many])
        references["sort", rows, dtype] = microseconds([partial(by_sort, x, 50, 0.9, noise) for x in many[:2]])
    return {
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "logits": form,
        "kind": kind,
        "us": time,
        "warm us": microseconds([partial(sampler.sample, many[0], step)]),
        "of ceiling": f"{size / time / 1e3 / READ_CEILING:.0%}",
        "wrong": f"{wrong} of {len(checked)}",
        "argmax us": references[rows, dtype],
        "sort us": references["sort", rows, dtype],
    }


def run() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    references: dict[Any, float] = {}
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 64, 256):
            for kind in KINDS if dtype == torch.float32 else list(KINDS)[:4]:
                for form in ("normal", "falling") if kind in ("temperature", "top_p 0.9") else ("normal",):
                    table.append(measure(kind, form, rows, dtype, references))
                    torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    chosen = parser.parse_args()
    with torch.inference_mode():
        table = run()
    print_table(table)
    print(write_results("sampling", table, chosen.results))


if __name__ == "__main__":
    main()
