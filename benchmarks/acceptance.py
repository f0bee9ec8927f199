"""How near speculation comes to what its theory promises: a proposer whose acceptance and cost are set, batch 1.

    python benchmarks/acceptance.py [--model random:llama-8b] [--acceptance 0.8] [--drafts 4] [--out FOLDER]

With k drafts, each accepted with probability a whatever came before, a row keeps (1 - a^(k+1)) / (1 - a) tokens a step,
and the step costs k c_draft + c_verify plain ones (Leviathan et al. 2023); their ratio is `predicted`. `measured` is
the time of a token without speculation over that with it, both medians of whole answers in an otherwise idle engine.

The proposer knows the answer from a run without speculation and proposes, for each position, its token or a wrong one,
as a coin of that position says. What a draft costs is imposed: a vector times a matrix that has `--draft-share` of the
target's bytes, once a draft, one after another; `c_draft` is the time of that on the device, measured alone. `c_verify`
is the step's time where no draft is ever right, in plain steps, less k c_draft. Everything else is real: the target's
step of 1 + k queries, verification, pages, scheduler, detokenisation.

Random weights give near ties, which a step of another shape may decide otherwise: a bias makes one token the target's
sure choice. `predicted` uses the a that was asked for; `kept` is what the coins gave.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from pegboard import Engine, Part, SamplingParams, hookimpl
from pegboard.benchmark.host import HostWatch
from pegboard.benchmark.setup import setup
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec
from pegboard.devices import torch_device

HERE = Path(__file__).parent
#: The target's sure choice, and a draft that is wrong.
RIGHT, WRONG = 42, 43
PROMPT = 128


class CoinOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    drafts: int
    #: Bytes that a draft reads, at least.
    draft_bytes: int


class Coin(Speculator):
    """Proposes the token of each position that `toss` has written down."""

    capturable = True
    made: Coin

    def __init__(self, need: SpeculatorNeed, options: CoinOptions) -> None:
        device = torch.device(torch_device(need.device))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = math.isqrt(options.draft_bytes // dtype.itemsize)
        self._drafts = options.drafts
        self._places = torch.arange(1, options.drafts + 1, device=device)
        self._proposed = torch.full((need.max_length + options.drafts,), WRONG, dtype=torch.int64, device=device)
        self._matrix = torch.randn(size, size, dtype=dtype, device=device) / max(size, 1) ** 0.5
        self._vector = torch.randn(size, 1, dtype=dtype, device=device)
        Coin.made = self

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: CoinOptions) -> Sequence[str]:
        return ()

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: CoinOptions) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=options.drafts, weight_bytes=options.draft_bytes)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    def toss(self, acceptance: float, answer: Sequence[int], seed: int) -> None:
        """One coin a position: right with probability `acceptance`."""
        right = torch.rand(len(self._proposed), generator=torch.Generator().manual_seed(seed)) < acceptance
        tokens = torch.full_like(self._proposed, RIGHT, device="cpu")
        tokens[PROMPT : PROMPT + len(answer)] = torch.tensor(answer)
        wrong = torch.where(tokens == WRONG, RIGHT, WRONG)
        self._proposed.copy_(torch.where(right, tokens, wrong))

    def open(self, openings: Sequence[SlotOpening]) -> None:
        """Nothing depends on the text."""

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        """Nothing depends on the text."""

    def propose(self, context: DraftContext) -> Drafts:
        count = min(context.drafts, self._drafts)
        self.burn(count)
        places = context.positions[:, None] + self._places[:count]
        return Drafts(ids=self._proposed[places.clamp_(max=len(self._proposed) - 1)])

    def burn(self, drafts: int) -> Tensor:
        """What drafts cost: each needs the one before."""
        state = self._vector
        if len(self._matrix):
            for _ in range(drafts):
                state = self._matrix @ state
        return state


class CoinPlugin:
    @hookimpl
    def pegboard_parts(self) -> tuple[Part, ...]:
        return (
            Part(role="speculator", name="coin", factory=Coin, options=CoinOptions, summary="as often right as set"),
        )


def seconds_of_draft(coin: Coin, drafts: int) -> float:
    """On the device alone: on CUDA of a graph."""
    with torch.inference_mode():
        if coin._vector.device.type == "cuda":
            from gpu_timing import microseconds

            return microseconds([lambda: coin.burn(drafts)], target_ms=20) / 1e6 / drafts
        coin.burn(drafts)
        begin = time.perf_counter()
        for _ in range(5):
            coin.burn(drafts)
        return (time.perf_counter() - begin) / 5 / drafts


class Run:
    """One engine: the time of a token in answers to one prompt, each computed anew."""

    def __init__(self, asked: argparse.Namespace, drafts: int, draft_bytes: int = 0) -> None:
        self.tokens = asked.tokens
        self._watch, self._salt = HostWatch(), 0
        settings: dict[str, Any] = {}
        if drafts:
            options = {"drafts": drafts, "draft_bytes": draft_bytes}
            settings = {"speculator": {"use": "coin", "options": options}, "adapt_drafts": False}
        self.engine = Engine(
            asked.model,
            device=asked.device,
            max_rows=asked.rows,
            max_length=PROMPT + asked.tokens,
            kv_memory=asked.kv_memory,
            plugins=[CoinPlugin()],
            watchers=[self._watch],
            **settings,
        )

    def answer(self) -> tuple[float, tuple[int, ...]]:
        self._salt += 1
        sampling = SamplingParams(temperature=0.0, logit_bias={RIGHT: 1e4}, max_tokens=self.tokens, ignore_eos=True)
        prompt = [5 + 7 * place % 97 for place in range(PROMPT)]
        output = self.engine.submit(prompt, sampling, salt=str(self._salt)).result().raise_for_error()
        return output.metrics.itl or math.nan, output.token_ids

    def measure(self, rounds: int) -> dict[str, Any]:
        """Steps are those with drafts."""
        stats = self.engine.stats().speculation
        before = None if stats is None else (stats.steps, sum(stats.accepted))
        self._watch.clear()
        found = [self.answer() for _ in range(rounds)]
        host = self._watch.of(1)
        seconds = statistics.median(itl for itl, _ in found)
        told: dict[str, Any] = {"token": seconds, "answer": found[-1][1]}
        if host is not None:
            told |= {"host": host.median, "launch": host.launch, "retire": host.retire}
        stats = self.engine.stats().speculation
        if before is not None and stats is not None:
            steps = stats.steps - before[0]
            told |= {"kept": 1 + (sum(stats.accepted) - before[1]) / steps, "steps": steps / rounds}
        return told


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    plain = Run(asked, 0)
    with plain.engine as engine:
        weights = engine.plan.memory.weights
        plain.measure(2)
        base = plain.measure(asked.rounds)
        facts = {"parts": setup(engine).parts, "weights": weights}
    answer, rows, ways = base.pop("answer"), [], []
    for drafts in asked.drafts:
        run = Run(asked, drafts, int(asked.draft_share * weights))
        with run.engine as engine:
            coin = Coin.made
            coin.toss(0.0, answer, 0)
            run.measure(2)
            never = run.measure(asked.rounds)
            draft = seconds_of_draft(coin, drafts) / base["token"]
            verify = never["token"] * never["kept"] / base["token"] - drafts * draft
            facts["speculating"] = setup(engine).parts
            ways.append({"drafts": drafts, "c_draft": draft, "c_verify": verify, **without_answer(never)})
            print(ways[-1], flush=True)
            for share in asked.acceptance:
                coin.toss(share, answer, asked.seed)
                found = run.measure(asked.rounds)
                rows.append(
                    {
                        "acceptance": share,
                        "drafts": drafts,
                        "expected": kept(share, drafts),
                        "predicted": kept(share, drafts) / (drafts * draft + verify),
                        "measured": base["token"] / found["token"],
                        "match": found["answer"] == answer,
                        **without_answer(found),
                    }
                )
    return {**facts, "plain": base, "steps": ways, "runs": rows}


def kept(share: float, drafts: int) -> float:
    """Tokens that a row keeps in a step."""
    return float(1 + drafts) if share == 1 else (1 - share ** (drafts + 1)) / (1 - share)


def without_answer(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "answer"}


def table(found: dict[str, Any]) -> str:
    lines = [f"plain: {found['plain']['token'] * 1e3:.3f} ms a token"]
    lines += [f"{'k':>2}{'c_draft':>9}{'c_verify':>10}{'step':>7}{'host ms':>9}{'launch ms':>11}"]
    for way in found["steps"]:
        cost = way["drafts"] * way["c_draft"] + way["c_verify"]
        host = "".join(f"{way.get(name, math.nan) * 1e3:>{width}.2f}" for name, width in (("host", 9), ("launch", 11)))
        lines.append(f"{way['drafts']:>2}{way['c_draft']:>9.3f}{way['c_verify']:>10.3f}{cost:>7.2f}{host}")
    lines.append(f"{'a':>4}{'k':>3}{'expected':>10}{'kept':>7}{'predicted':>11}{'measured':>10}{'match':>7}")
    lines += [
        f"{row['acceptance']:>4.2f}{row['drafts']:>3}{row['expected']:>10.2f}{row['kept']:>7.2f}"
        f"{row['predicted']:>11.2f}{row['measured']:>10.2f}{'yes' if row['match'] else 'NO':>7}"
        for row in found["runs"]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--acceptance", type=float, action="append", help="a; 0.5 to 0.9")
    parser.add_argument("--drafts", type=int, action="append", help="k; 1 to 8")
    parser.add_argument("--draft-share", type=float, default=0.03, help="of the target's bytes that a draft reads")
    parser.add_argument("--tokens", type=int, default=384, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1, help="max_rows of the engine")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--seed", type=int, default=0, help="of the coins")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args(arguments)
    asked.acceptance = asked.acceptance or [0.5, 0.6, 0.7, 0.8, 0.9]
    asked.drafts = asked.drafts or [1, 2, 3, 4, 6, 8]
    found = measure(asked)
    print(table(found))
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"acceptance-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    device = torch.cuda.get_device_name() if asked.device.startswith("cuda") else asked.device
    told = {name: value for name, value in vars(asked).items() if name != "out"}
    file.write_text(json.dumps({**told, "machine": device, "torch": torch.__version__, **found}, indent=1) + "\n")
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
