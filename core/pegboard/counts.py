"""Fields that count something."""

from __future__ import annotations

from collections.abc import Mapping


def count_problems(record: object, least: Mapping[str, int]) -> list[str]:
    """Which of the fields, named with what they are at least, hold no such whole number."""
    return [
        f"{name} is {getattr(record, name)!r}, must be a whole number from {number} on"
        for name, number in least.items()
        if type(getattr(record, name)) is not int or getattr(record, name) < number
    ]
