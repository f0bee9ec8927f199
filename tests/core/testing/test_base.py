"""The base of the suites: what is collected, skipped, refused, exempt, and how a suite without pytest says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pegboard import Part
from pegboard.testing.conformance import (
    TOLERANCES,
    Candidate,
    Outcome,
    Suite,
    check,
    compare,
    run_suite,
    same_bits,
    unchanged,
)


class Doubler:
    """A part that doubles; it refuses needs that are named in `options`."""

    @classmethod
    def refusals(cls, need: str, options: Any) -> list[str]:
        return [f"can't do {need}"] if need in (options or ()) else []

    @classmethod
    def create(cls, need: str, options: Any) -> Doubler:
        return cls()

    def double(self, x: int) -> int:
        return 2 * x


class DoublerSuite(Suite, standard=True):
    role = "ops"
    features = ("odd",)

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, Any]]:
        yield from ((f"dtype {dtype}", dtype) for dtype in cls.dtypes)
        yield from ((f"claim {claim}", claim) for claim in cls.claims)

    def test_doubles(self, candidate: Candidate, dtype: str) -> None:
        part = candidate.create(dtype)
        check(part.double(3) == 6, "does not double")

    def test_odd(self, candidate: Candidate) -> None:
        check(candidate.create("odd").double(1) == 2, "does not double odd numbers")


class Good(DoublerSuite):
    part = Doubler
    dtypes = ("float32", "float64")


def results(outcomes: Iterable[Outcome]) -> dict[str, str]:
    return {outcome.case: outcome.result for outcome in outcomes}


BASE = {"test_serves_what_is_declared": "passed", "test_standard_tests_stand": "passed"}


def test_a_good_part_passes_every_case_of_every_axis() -> None:
    assert results(run_suite(Good)) == BASE | {
        "test_doubles[float32]": "passed",
        "test_doubles[float64]": "passed",
        "test_odd": "passed",
    }


def test_a_broken_part_fails() -> None:
    class Tripler(Doubler):
        def double(self, x: int) -> int:
            return 3 * x

    class Broken(Good):
        part = Tripler

    found = run_suite(Broken)
    assert {o.case for o in found if o.result == "failed"} == {
        "test_doubles[float32]",
        "test_doubles[float64]",
        "test_odd",
    }
    assert "does not double odd numbers" in next(o.reason for o in found if o.case == "test_odd")
    assert set(results(run_suite(Broken, "odd"))) == {"test_odd"}


def test_what_the_part_refuses_is_skipped_with_its_reason() -> None:
    class Refusing(Good):
        options = ("odd",)

    found = {o.case: o for o in run_suite(Refusing)}
    assert found["test_odd"].result == "skipped"
    assert found["test_odd"].reason == "refused: can't do odd"
    assert found["test_doubles[float32]"].result == "passed"


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"options": ("odd",), "claims": ("odd",)}, "claim odd"), ({"options": ("float32", "float64")}, "dtype float64")],
    ids=["claim", "everything"],
)
def test_what_is_declared_must_not_be_refused(changes: dict[str, Any], named: str) -> None:
    """So a suite of which every case is skipped fails."""
    refusing = type("Refusing", (Good,), changes)
    found = {o.case: o for o in run_suite(refusing)}
    assert found["test_serves_what_is_declared"].result == "failed"
    assert named in found["test_serves_what_is_declared"].reason


def overriding(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_odd": None}, "deletes the standard test test_odd"),
        ({"test_odd": overriding}, "overrides the standard test test_odd"),
        ({"test_standard_tests_stand": overriding}, "overrides the standard test test_standard_tests_stand"),
        ({"test_odd": None, "exempt": {"test_odd": " "}}, "must say why"),
        ({"exempt": {"test_od": "typo"}}, "did you mean 'test_odd'"),
        ({"exempt": {"test_serves_what_is_declared": "lazy"}}, "can't be exempt"),
        ({"claims": ("old",)}, "did you mean 'odd'"),
        ({"dtypes": ()}, "dtypes is empty"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_weakened_suites_are_errors_when_they_are_defined(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Weak", (Good,), changes)


def test_a_mixin_can_not_hide_a_standard_test() -> None:
    class Mixin:
        def test_odd(self) -> None: ...

    with pytest.raises(TypeError, match="overrides the standard test test_odd"):
        type("Weak", (Mixin, Good), {})


def test_what_is_deleted_afterwards_is_found() -> None:
    class Weakened(Good):
        pass

    Weakened.test_odd = None  # type: ignore[assignment,method-assign]
    found = {o.case: o for o in run_suite(Weakened)}
    assert found["test_standard_tests_stand"].result == "failed"
    assert "deletes the standard test test_odd" in found["test_standard_tests_stand"].reason


def test_an_exemption_shows_its_reason_and_may_replace_the_test() -> None:
    class Exempt(Good):
        exempt = {"test_odd": "odd numbers are not sold here", "test_doubles": "ours is stricter"}

        def test_doubles(self) -> None: ...

    found = {o.case: o for o in run_suite(Exempt)}
    assert found["test_odd"].reason == "exempt: odd numbers are not sold here"
    assert found["test_doubles"].result == "passed"


def test_parts_by_descriptor_and_by_name() -> None:
    class ByPart(Good):
        part = Part(role="ops", name="doubler", factory=Doubler, summary="")

    class WrongRole(Good):
        part = Part(role="cache", name="doubler", factory=Doubler, summary="")

    class ByName(Good):
        part = "torch"

    class Missing(Good):
        part = "no-such-ops"

    class Forgotten(Good):
        part = None

    class Prepared(Good):
        part = None

        @pytest.fixture
        def candidate(self, tmp_path: Any) -> Candidate:
            assert tmp_path.exists()
            return Candidate(Doubler)

    assert run_suite(ByPart, "odd")[0].result == "passed"
    assert run_suite(Prepared, "odd")[0].result == "passed"
    assert "this suite tests the role 'ops'" in run_suite(WrongRole, "odd")[0].reason
    assert "no ops named 'no-such-ops'" in run_suite(Missing, "odd")[0].reason
    assert "must set `part`" in run_suite(Forgotten, "odd")[0].reason
    # TorchOps is found, and does not know a need that is a string
    assert "AttributeError: 'str' object has no attribute 'dtype'" in run_suite(ByName, "odd")[0].reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_skips() -> None:
    class OnCuda(Good):
        device = "cuda"

    found = run_suite(OnCuda)
    assert {o.result for o in found} == {"skipped"}
    assert "no CUDA device here" in found[0].reason


def test_compare_finds_the_worst_element() -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, torch.inf]])
    compare(expected.clone(), expected, TOLERANCES["float32"], "same")
    found = expected.clone()
    found[0, 1] += 1e-3
    found[1, 0] += 1e-2
    with pytest.raises(AssertionError, match=r"scores: 2 of 4 elements differ; at \(1, 0\)"):
        compare(found, expected, TOLERANCES["float32"], "scores")
    found[0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"at \(0, 0\) nan"):
        compare(found, expected, TOLERANCES["float32"], "scores")
    with pytest.raises(AssertionError, match="shape"):
        compare(found[0], expected, TOLERANCES["float32"], "scores")


def test_unchanged_sees_a_single_bit_and_lets_nan_be() -> None:
    x = torch.tensor([0.0, torch.nan, 1.0])
    with unchanged(x=x, nothing=None):
        pass
    with pytest.raises(AssertionError, match="x was changed"), unchanged(x=x):
        x[0] = -0.0
    assert not same_bits(x, x.double())


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_suites_need_pytest() -> None:
    blocked = "import sys; sys.modules['pytest'] = None; import pegboard.testing as t; "
    assert run(blocked + "print(t.FakeClock(3.0)(), t.tiny_model.__name__)") == "3.0 tiny_model"
    code = blocked + "\ntry:\n  t.AttentionSuite\nexcept ModuleNotFoundError as e: print(e)"
    assert "pip install pytest" in run(code)
    assert run("import sys, pegboard.testing; print('torch' in sys.modules, 'pytest' in sys.modules)") == "False False"
