"""The same engine from a TOML file, a YAML file and a dict, and what can be changed and asked on the way.

python assemble.py [MODEL] [--max-tokens N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pegboard import ConfigError, Engine, SamplingParams, load_config

HERE = Path(__file__).parent
AS_DICT = {
    "model": "smollm2-135m-instruct",
    "device": "cpu",
    "max_length": 512,
    "max_rows": 4,
    "scheduler": {"use": "continuous", "options": {"chunk": 64}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()

    sources = {"toml": HERE / "engine.toml", "yaml": HERE / "engine.yaml", "dict": AS_DICT}
    configs = {name: load_config(source, {"model": options.model}) for name, source in sources.items()}
    print("equal:", configs["toml"] == configs["yaml"] == configs["dict"])

    # Dotted overrides, as --set takes them on the command line.
    config = load_config(configs["toml"], ["scheduler.options.chunk=32", "cache=paged"])
    print("chunk:", config.scheduler.options["chunk"], "and still", configs["toml"].scheduler.options["chunk"])

    # Every problem at once, before a weight is read.
    try:
        load_config(AS_DICT, ["page_size=24", "max_row=4"])
    except ConfigError as error:
        for reason in error.reasons:
            print("refused:", reason)

    with Engine.from_config(config, max_rows=2) as engine:  # keywords override, too
        print("rows:", engine.config.max_rows)
        for decision in engine.decisions:
            if decision.where in ("scheduler", "attention"):
                print(f"{decision.where}: {decision.winner} (asked: {decision.asked})")
        output = engine.generate("Two and two is", SamplingParams(temperature=0, max_tokens=options.max_tokens))
        print("text:", repr(output.text))


if __name__ == "__main__":
    main()
