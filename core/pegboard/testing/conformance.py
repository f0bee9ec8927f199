"""What every conformance suite shares: the part under test, what it declares, exemptions, and how numbers are compared.

A suite is a class of pytest tests. A plugin's author subclasses it, names the part, and pytest does the rest. What the
part refuses is skipped with the part's own reasons; what it was declared to serve must not be refused.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, ClassVar, Final, Literal

import msgspec
import pytest
import torch
from torch import Tensor

from ..contracts.device import DeviceFacts
from ..contracts.part import Part
from ..devices import device_facts
from ..errors import ConfigError, PluginError
from ..registry.options import nearest
from ..registry.parts import RegisteredPart
from ..registry.registry import Registry
from ..tolerances import TOLERANCES as TOLERANCES
from ..tolerances import Tolerance as Tolerance

Grid = Literal["small", "normal", "full"]


@dataclass(frozen=True)
class Candidate:
    """The part under test: its factory (a class that follows the role's contract) and its options."""

    factory: Any
    options: Any = None

    def refusals(self, need: Any) -> list[str]:
        """Why the part can't serve `need`; empty: it can."""
        return list(self.factory.refusals(need, self.options))

    def require(self, need: Any) -> None:
        """Skip the test, with the part's own reasons, unless it serves `need`."""
        reasons = self.refusals(need)
        if reasons:
            pytest.skip(f"refused: {'; '.join(reasons)}")

    def create(self, need: Any, **more: Any) -> Any:
        """A part made for `need`; the test is skipped if the part refuses it."""
        self.require(need)
        return self.factory.create(need, self.options, **more)


class Suite:
    """Base of the suites. A subclass names the part and what it declares; every standard test must stand.

    A standard test that is overridden or set to None is an error unless `exempt` gives a reason for it."""

    #: The role of the parts that the suite tests.
    role: ClassVar[str]
    #: The part: its factory class, a `Part`, or the name of an installed part. Or override the fixture `candidate`.
    part: ClassVar[Part | type | str | None] = None
    #: Of a factory class: the options object as `create` gets it. Else values, validated by the part's own model.
    options: ClassVar[Any] = None
    #: Declared: where the part runs ("cpu", "cuda", "cuda:1"), and dtypes that it must not refuse.
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    #: Declared: features (of `features`) that the part must not refuse. Others are tried, and skipped when refused.
    claims: ClassVar[tuple[str, ...]] = ()
    #: Standard tests that do not hold for this part -> why. Shown with every run.
    exempt: ClassVar[Mapping[str, str]] = {}
    #: How many shapes are tried. "small" is for interpreters, where each launch costs seconds.
    grid: ClassVar[Grid] = "full" if os.environ.get("PEGBOARD_FULL") else "normal"

    #: What `claims` may name.
    features: ClassVar[tuple[str, ...]] = ()
    #: Test parameter -> the attribute that lists its values.
    axes: ClassVar[Mapping[str, str]] = {"dtype": "dtypes"}

    #: Standard tests as their suites define them.
    _standard: ClassVar[Mapping[str, FunctionType]] = {}
    _is_standard: ClassVar[bool] = True

    def __init_subclass__(cls, *, standard: bool = False, **kwargs: Any) -> None:
        """`standard`: the class is itself a suite to subclass, and its tests become standard ones."""
        super().__init_subclass__(**kwargs)
        cls._is_standard = standard
        problems = _problems_of(cls)
        if problems:
            raise TypeError(f"{cls.__name__} is no conformance suite: {'; '.join(problems)}")
        if standard:
            own = {n: f for n, f in vars(cls).items() if n.startswith("test_") and isinstance(f, FunctionType)}
            cls._standard = MappingProxyType({**cls._standard, **own})

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for parameter, attribute in self.axes.items():
            if parameter in metafunc.fixturenames:
                metafunc.parametrize(parameter, getattr(self, attribute), ids=str)

    # -- what tests are given

    @pytest.fixture
    def candidate(self) -> Candidate:
        """The part that `part` and `options` name. Override it for a part that needs something prepared."""
        if self.part is None:
            raise TypeError(f"{type(self).__name__} must set `part` or override the fixture `candidate`")
        if isinstance(self.part, type):
            return Candidate(self.part, self.options)
        entry = _registered(self.role, self.part)
        return Candidate(entry.load(), entry.options(self.options or {}))

    @pytest.fixture(autouse=True)
    def _hold_to_declarations(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        reason = self.exempt.get(name)
        if reason is not None and getattr(type(self), name) is self._standard.get(name):
            pytest.skip(f"exempt: {reason}")
        try:
            self.facts()
        except ConfigError as error:
            pytest.skip(str(error))

    @classmethod
    def facts(cls) -> DeviceFacts:
        """The declared device. ConfigError: it is not here."""
        return device_facts(cls.device)

    @classmethod
    def is_declared(cls, attribute: str) -> bool:
        """Whether a subclass set the attribute itself, rather than the suite."""
        return not next(c for c in cls.__mro__ if attribute in vars(c)).__dict__.get("_is_standard", False)

    @classmethod
    def standard_tests(cls) -> frozenset[str]:
        """Names of the tests that must stand."""
        return frozenset(cls._standard)

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, Any]]:
        """(what is declared, a need that follows from it) of everything that the part must serve."""
        return ()

    # -- standard tests of every role

    def test_serves_what_is_declared(self, candidate: Candidate) -> None:
        """A suite that skips everything shows nothing: what was declared must not be refused."""
        refused = [
            f"{declared}: {'; '.join(reasons)}"
            for declared, need in self.declared_needs()
            if (reasons := candidate.refusals(need))
        ]
        check(not refused, "declared, but refused by the part:\n  " + "\n  ".join(refused))

    def test_standard_tests_stand(self) -> None:
        """Nothing was deleted or replaced after the class was made."""
        problems = _problems_of(type(self))
        check(not problems, "; ".join(problems))


Suite._standard = MappingProxyType({n: f for n, f in vars(Suite).items() if n.startswith("test_")})
#: Without these a suite could be emptied without a trace.
_NEVER_EXEMPT: Final = frozenset(Suite._standard)


def _problems_of(cls: type[Suite]) -> list[str]:
    problems = []
    for name, reason in cls.exempt.items():
        if name not in cls._standard:
            problems.append(f"exempt names {name!r}, which is no standard test{nearest(name, cls._standard)}")
        elif name in _NEVER_EXEMPT:
            problems.append(f"{name} can't be exempt")
        elif not (isinstance(reason, str) and reason.strip()):
            problems.append(f"exempt[{name!r}] must say why")
    for name, test in cls._standard.items():
        if getattr(cls, name, None) is not test and (name not in cls.exempt or name in _NEVER_EXEMPT):
            done = "deletes" if getattr(cls, name, None) is None else "overrides"
            problems.append(f"it {done} the standard test {name}: say why in exempt = {{{name!r}: ...}}")
    for claim in cls.claims:
        if claim not in cls.features:
            valid = ", ".join(cls.features) or "none"
            problems.append(f"claims {claim!r}{nearest(claim, cls.features)}; features of this suite: {valid}")
    for attribute in cls.axes.values():
        if not getattr(cls, attribute):
            problems.append(f"{attribute} is empty")
    return problems


@cache
def _discovered() -> Registry:
    return Registry.discover()


def _registered(role: str, part: Part | str) -> RegisteredPart:
    if isinstance(part, str):
        return _discovered().get(role, part)
    if part.role != role:
        raise PluginError(f"part {part.name!r} is a {part.role}; this suite tests the role {role!r}")
    return RegisteredPart(part=part, plugin="under test", distribution=None, version=None)


# -- what tests say


def check(right: bool, message: str) -> None:
    """Raise AssertionError(message) unless `right`. An `assert` would vanish under -O."""
    if not right:
        raise AssertionError(message)


def compare(found: Tensor, expected: Tensor, tolerance: Tolerance, what: str) -> None:
    """AssertionError, naming `what` and the worst element, where `found` is off by more than the tolerance."""
    check(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    excess = (found - expected).abs() - tolerance.absolute - tolerance.relative * expected.abs()
    wrong = ~((excess <= 0) | (found == expected)).contiguous()  # so that NaN is wrong, and equal infinities are right
    if not wrong.any():
        return
    worst = excess.masked_fill(excess.isnan(), torch.inf).masked_fill(~wrong, -torch.inf).flatten().argmax()
    place = tuple((int(worst) // stride) % extent for stride, extent in zip(wrong.stride(), wrong.shape, strict=True))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; at {place} {float(found[place])!r}, expected "
        f"{float(expected[place])!r} within {tolerance.absolute:g} + {tolerance.relative:g} of it"
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))


@contextlib.contextmanager
def unchanged(**tensors: Tensor | None) -> Iterator[None]:
    """AssertionError naming those of the tensors that were changed inside the block, by a single bit."""
    before = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    yield
    for name, old in before.items():
        new = tensors[name]
        check(new is not None and same_bits(old, new), f"{name} was changed")


@contextlib.contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """On CUDA, RuntimeError where the block waits for the device."""
    if not device.startswith("cuda"):
        yield
        return
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64 on the CPU, the same on every machine; round and move them as needed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- a suite outside of a test session


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One case of a suite. `test` is the test's name, `case` the whole name with its parameters."""

    test: str
    case: str
    result: Literal["passed", "failed", "skipped"]
    #: Why it failed or was skipped.
    reason: str = ""


def run_suite(suite: type[Suite], keyword: str = "") -> tuple[Outcome, ...]:
    """Run a suite in this process, wherever its class was defined, and say how each case went.

    `keyword` selects tests as pytest's -k does."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        runner = _Runner(suite, folder / "suite")
        runner.place.touch()
        arguments = [str(runner.place), "-k", keyword, "-c", os.devnull, "-q", "-s", "--tb=native", "--noconftest"]
        arguments += [f"--rootdir={folder}", f"--confcutdir={folder}"]
        # What these watch, the session around does, if there is one
        for plugin in ("cacheprovider", "faulthandler", "logging", "threadexception", "unraisableexception"):
            arguments += ["-p", f"no:{plugin}"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = pytest.main(arguments, plugins=[runner])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{suite.__name__} did not run (pytest says {status}):\n{printed.getvalue()}")
    return tuple(runner.outcomes())


class _Runner:
    """A pytest plugin that collects one class and keeps the reports."""

    def __init__(self, suite: type[Suite], place: Path) -> None:
        #: An empty file, since pytest collects files.
        self.place = place
        self._suite = suite
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_collect_file(self, parent: pytest.Collector, file_path: Path) -> pytest.Module | None:
        if file_path != self.place:
            return None
        module = pytest.Module.from_parent(parent, path=file_path)
        made = ModuleType("suite")
        made.TestSuite = self._suite  # type: ignore[attr-defined]
        module.obj = made
        return module

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.setdefault(report.nodeid.rpartition("::")[2], []).append(report)

    def outcomes(self) -> Iterator[Outcome]:
        for case, reports in self._reports.items():
            told = next((r for r in reports if r.failed), None) or next((r for r in reports if r.skipped), reports[0])
            reason = ""
            if told.skipped and isinstance(told.longrepr, tuple):
                reason = told.longrepr[2].removeprefix("Skipped: ")
            elif not told.passed:
                reason = told.longreprtext
            yield Outcome(test=case.partition("[")[0], case=case, result=told.outcome, reason=reason)
