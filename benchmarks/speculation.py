"""What speculation gains: the same requests with and without a speculator, in turns on one device.

    python benchmarks/speculation.py --model smollm2-135m-instruct
    python benchmarks/speculation.py --model TARGET --draft DRAFT --device cuda

Arms run every prompt one after another, batch 1, greedy, in an order that turns with every round; the time of an arm is
that from the first token to the last. `speedup` is the median over rounds of (plain time / arm's time), `match` whether
its tokens are those of `plain` (rounding may part them, rarely). `predicted` and `measured` are the engine's own words
(`Engine.stats().speculation`). Prompts ask for copies: of a text, a list, code, a table; with `--prompts-of chat` for
answers, as people ask for them.

    plain        no speculator
    ngram        prompt lookup, as many drafts as pay
    ngram all    the same, always with all drafts
    draft        a draft model (--draft)
    medusa all   trained heads, always with all drafts (--heads KIND=FOLDER, may be repeated; `pegboard train-heads`)
    medusa       the same, as many drafts as pay
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pegboard import Engine, SamplingParams

HERE = Path(__file__).parent

RIVER = (
    "The mill stands where the two rivers meet. In spring the water reaches the third step, and in dry summers "
    "children cross on the stones. The miller's ledger names every flood since 1811, with its height in feet."
)
PEOPLE = (
    "1. Anna Berg, Lindau, 34, carpenter\n2. Tomas Vesely, Brno, 51, baker\n3. Ines Duarte, Porto, 29, pilot\n"
    "4. Kofi Mensah, Accra, 42, teacher\n5. Maria Rossi, Turin, 38, nurse"
)
CODE = (
    "def area(width, height):\n    return width * height\n\n\n"
    "def perimeter(width, height):\n    return 2 * (width + height)\n\n\n"
    "def volume(width, height, depth):\n    return area(width, height) * depth"
)
TABLE = (
    "city,year,rain\nOslo,2019,763\nOslo,2020,1024\nOslo,2021,618\nBergen,2019,2205\nBergen,2020,2890\nBergen,2021,1911"
)
PROMPTS = tuple(
    f"{ask}\n\n{text}"
    for ask, text in (
        ("Repeat this text word for word:", RIVER),
        ("Copy this list exactly as it is:", PEOPLE),
        ("Write this Python code again without changing anything:", CODE),
        ("Print this CSV file unchanged:", TABLE),
        ("Quote the following paragraph in full:", RIVER),
        ("Write out this list once more:", PEOPLE),
    )
)

CHAT = (
    "How do I keep basil alive on a windowsill?",
    "Why is the sky blue? Answer in a short paragraph.",
    "Write a polite note to a neighbour whose dog barks at night.",
    "What should I pack for a weekend in the mountains in autumn?",
    "Explain what a prime number is, with an example.",
    "Give me three ideas for a birthday party at home.",
    "What is the difference between a lake and a pond?",
    "Describe a morning in a small fishing village.",
)
SETS = {"copies": PROMPTS, "chat": CHAT}


class Arm:
    def __init__(self, name: str, model: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.engine = Engine(model, max_rows=2, max_length=1024, **settings)
        #: Seconds of each round, and tokens of the last.
        self.seconds: list[float] = []
        self.tokens: list[tuple[int, ...]] = []

    def run(self, prompts: Sequence[str], sampling: SamplingParams) -> None:
        seconds, self.tokens = 0.0, []
        for prompt in prompts:
            output = self.engine.chat([{"role": "user", "content": prompt}], sampling).raise_for_error()
            self.tokens.append(output.token_ids)
            seconds += (output.metrics.itl or 0.0) * (len(output.token_ids) - 1)
        self.seconds.append(seconds)


def make_arms(
    model: str, draft: str | None, heads: Sequence[str], head_drafts: int | None, common: dict[str, Any]
) -> list[Arm]:
    ngram = {"speculator": {"use": "ngram", "options": {"drafts": 8}}}
    settings: dict[str, Any] = {"plain": {}, "ngram": ngram, "ngram all": {**ngram, "adapt_drafts": False}}
    for each in heads:
        kind, _, folder = each.partition("=")
        options = {"model": folder} | ({} if head_drafts is None else {"drafts": head_drafts})
        trained = {"speculator": {"use": kind, "options": options}}
        settings |= {kind: trained, f"{kind} all": {**trained, "adapt_drafts": False}}
    if draft is not None:
        settings["draft"] = {"speculator": {"use": "draft_model", "options": {"model": draft}}}
    return [Arm(name, model, {**common, **own}) for name, own in settings.items()]


Counts = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def measure(arms: Sequence[Arm], rounds: int, prompts: Sequence[str], tokens: int) -> Counts:
    """One round more than `rounds`, which nobody counts: kernels are compiled in it. What each arm had proposed and
    accepted before."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    before: Counts = {}
    for arm in arms:
        arm.seconds, stats = [], arm.engine.stats().speculation
        if stats is not None:
            before[arm.name] = (tuple(stats.proposed), tuple(stats.accepted))
    for turn in range(rounds + 1):
        first = turn % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            arm.run(prompts, sampling)
    for arm in arms:
        del arm.seconds[0]
    return before


def since(after: Sequence[int], before: Sequence[int]) -> list[int]:
    """By place; an engine that has not drafted yet has none."""
    return [count - (before[place] if place < len(before) else 0) for place, count in enumerate(after)]


def summary(arms: Sequence[Arm], before: Counts | None = None) -> list[dict[str, Any]]:
    plain, found = arms[0], []
    for arm in arms:
        made = sum(len(ids) - 1 for ids in arm.tokens)
        stats = arm.engine.stats().speculation
        proposed: list[int] = []
        accepted: list[int] = []
        if stats is not None:
            earlier = (before or {}).get(arm.name, ((), ()))
            proposed, accepted = since(stats.proposed, earlier[0]), since(stats.accepted, earlier[1])
        drafted = proposed[0] if proposed else 0
        found.append(
            {
                "arm": arm.name,
                "tokens_per_second": made / statistics.median(arm.seconds),
                "speedup": statistics.median(a / b for a, b in zip(plain.seconds, arm.seconds, strict=True)),
                "match": arm.tokens == plain.tokens,
                "mean_length": 1 + sum(accepted) / drafted if drafted else None,
                "acceptance": [
                    round(right / count, 3) for right, count in zip(accepted, proposed, strict=True) if count
                ],
                "predicted": None if stats is None else stats.predicted,
                "measured": None if stats is None else stats.measured,
                "break_even": None if stats is None else stats.break_even,
                "seconds": arm.seconds,
            }
        )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    def text(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [f"{'arm':<12}{'tokens/s':>10}{'speedup':>9}{'match':>7}{'mean length':>13}{'predicted':>11}  acceptance"]
    for row in found:
        shares = " ".join(f"{share:.2f}" for share in row["acceptance"] or ())
        lines.append(
            f"{row['arm']:<12}{text(row['tokens_per_second'], 1):>10}{text(row['speedup']):>9}"
            f"{'yes' if row['match'] else 'NO':>7}{text(row['mean_length']):>13}{text(row['predicted']):>11}  {shares}"
        )
    return "\n".join(lines)


def _facts(heads: str) -> dict[str, Any]:
    """What they say of their training."""
    kind, _, folder = heads.partition("=")
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return {"kind": kind, "folder": Path(folder).name, "training": config.get("training")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", help="a draft model; none: no such arm")
    parser.add_argument("--heads", action="append", default=[], metavar="KIND=FOLDER", help="trained heads")
    parser.add_argument("--head-drafts", type=int, help="drafts of trained heads; none: their default")
    parser.add_argument("--prompts-of", choices=SETS, action="append", help="copies; may be repeated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-memory", help="of each engine; several on one GPU can't have most of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--prompts", type=int, help="so many of them; none: all")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args(arguments)
    common = {"device": asked.device}
    common |= {name: vars(asked)[name] for name in ("threads", "kv_memory") if vars(asked)[name] is not None}
    arms = make_arms(asked.model, asked.draft, asked.heads, asked.head_drafts, common)
    try:
        for prompts_of in asked.prompts_of or ["copies"]:
            before = measure(arms, asked.rounds, SETS[prompts_of][: asked.prompts], asked.tokens)
            report(asked, prompts_of, summary(arms, before))
    finally:
        for arm in arms:
            arm.engine.close()
    return 0


def report(asked: argparse.Namespace, prompts_of: str, found: Sequence[dict[str, Any]]) -> None:
    print(f"{prompts_of}\n{table(found)}" if asked.prompts_of and len(asked.prompts_of) > 1 else table(found))
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"speculation-{prompts_of}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    on_gpu = asked.device.startswith("cuda")
    facts = {
        "model": asked.model,
        "draft": asked.draft,
        "heads": [_facts(each) for each in asked.heads],
        "head_drafts": asked.head_drafts,
        "prompts_of": prompts_of,
        "device": asked.device,
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": asked.threads or torch.get_num_threads(),
        "torch": torch.__version__,
    }
    file.write_text(json.dumps({**facts, "arms": found}, indent=1) + "\n", encoding="utf-8")
    print(file)


if __name__ == "__main__":
    sys.exit(main())
