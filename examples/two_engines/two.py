"""Two engines in one process, with different parts, at the same time.

python two.py [MODEL] [OTHER_MODEL] [--max-tokens N]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from pegboard import Engine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("other", nargs="?", help="another model; by default the same")
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args()
    common = {"device": "cpu", "max_length": 512, "max_rows": 4}
    greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)

    exact = Engine(options.model, **common)
    small = Engine(options.other or options.model, quantizer="int8-cpu", scheduler="static", **common)
    with exact, small, ThreadPoolExecutor() as pool:
        for name, engine in (("exact", exact), ("small", small)):
            parts = engine.plan.parts
            weights = engine.plan.memory.weights / 2**20
            print(f"{name}: {parts['quantizer'].name}, {parts['scheduler'].name}, weights {weights:.1f} MiB")
        # Each has its own thread, memory and plugins; they don't know of each other.
        both = [pool.submit(engine.generate, "The capital of France is", greedy) for engine in (exact, small)]
        for name, answer in zip(("exact", "small"), both, strict=True):
            print(f"{name}: {answer.result().text!r}")

        exact.close()
        print("small goes on:", len(small.generate("One more:", greedy).token_ids), "tokens")


if __name__ == "__main__":
    main()
