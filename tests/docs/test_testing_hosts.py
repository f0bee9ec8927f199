"""The guide to testing names every public tool, every attribute of the suites, every method of `Faults`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import pytest

import pegboard.testing
from pegboard.testing.cache import CacheSuite
from pegboard.testing.checkpoint import CheckpointSuite
from pegboard.testing.conformance import Suite
from pegboard.testing.faulty import Faults
from pegboard.testing.model import ModelSuite
from pegboard.testing.scheduler import SchedulerSuite
from pegboard.testing.speculator import SpeculatorSuite

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("testing*.md")))


@pytest.mark.parametrize("suite", [CacheSuite, SchedulerSuite, SpeculatorSuite, ModelSuite, CheckpointSuite])
def test_a_suite_has_a_section_with_its_attributes_and_features(suite: type[Suite]) -> None:
    found = re.search(rf"^## `{suite.__name__}`\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no section `{suite.__name__}`"
    own = {name for name in get_type_hints(suite) if name in vars(suite) and name not in get_type_hints(Suite)}
    missing = {name for name in own | set(suite.features) if f"`{name}`" not in found[1]}
    assert not missing


def test_every_public_name_is_told() -> None:
    missing = {name for name in pegboard.testing.__all__ if name not in ("Candidate", "Outcome", "Suite", "Tolerance")}
    missing -= {name for name in missing if re.search(rf"\b{name}\b", TEXT)}
    assert not missing


def test_every_method_of_faults_is_told() -> None:
    methods = {name for name in vars(Faults) if not name.startswith("_")} - {"pegboard_parts"}
    assert not {name for name in methods if not re.search(rf"`{name}\b", TEXT)}
