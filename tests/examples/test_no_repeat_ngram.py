"""The logits processor of examples/third_party passes its own tests: the suite, the ban, an engine with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "third_party" / "no-repeat-ngram"


def test_its_own_tests_pass(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "--import-mode=importlib",
        f"--basetemp={tmp_path / 'base'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-c", os.devnull, f"--rootdir={FOLDER}", str(FOLDER / "tests")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
