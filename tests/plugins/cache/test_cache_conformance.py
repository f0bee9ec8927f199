"""The paged cache passes the suite that third-party managers run."""

from __future__ import annotations

from pegboard.testing.cache import CacheSuite


class TestPaged(CacheSuite):
    part = "paged"
    claims = ("prefixes", "windows", "states")
    prefix_unit = 16


class TestPagedWithoutReuse(CacheSuite):
    part = "paged"
    options = {"prefix_reuse": False}
    claims = ("windows", "states")
    grid = "small"
