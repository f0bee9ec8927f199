"""What importing costs, and what stays out of it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick_and_brings_no_torch() -> None:
    code = (
        "import time, sys; t = time.perf_counter(); import pegboard; print(time.perf_counter() - t); "
        "heavy = {'torch', 'triton', 'numpy', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    assert min(float(run(code)) for _ in range(3)) <= 0.2


@pytest.mark.parametrize("module", ["registry.registry", "config", "contracts.model", "contracts.executor", "request"])
def test_light_modules_bring_no_torch(module: str) -> None:
    code = f"import sys, pegboard.{module}; heavy = {{'torch', 'triton'}} & set(sys.modules); assert not heavy, heavy"
    run(code)


def test_every_public_name_can_be_imported() -> None:
    import pegboard

    for name in pegboard.__all__:
        assert getattr(pegboard, name) is not None
    assert set(pegboard.__all__) <= set(dir(pegboard))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = pegboard.nothing_like_this
