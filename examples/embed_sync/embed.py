"""A model inside a plain program.

python embed.py [MODEL] [--max-tokens N]
"""

from __future__ import annotations

import argparse

from pegboard import Engine, InvalidRequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens)

    with Engine(options.model, max_rows=8, max_length=512) as engine:
        # One answer, whole.
        output = engine.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
        print("answer:", output.text)
        print("finish:", output.finish_reason, len(output.token_ids))

        # Piece by piece; leaving the loop ends the request.
        print("stream: ", end="")
        for delta in engine.stream("Once upon a time", SamplingParams(seed=1, max_tokens=options.max_tokens)):
            print(delta.text, end="", flush=True)
        print()

        # Many share the steps; one that can't run does not hold the others up.
        prompts = ["Two and two is", "Water boils at", [10**9]]
        for prompt, found in zip(prompts, engine.generate(prompts, greedy), strict=True):
            print("many:", repr(prompt), "->", repr(found.text) if found.error is None else found.error)

        # What can't work is said at the call, with every reason.
        try:
            engine.generate("Hello", SamplingParams(max_tokens=0, top_p=2.0))
        except InvalidRequest as error:
            print("refused:", error)
    # Here all memory has been given back.


if __name__ == "__main__":
    main()
