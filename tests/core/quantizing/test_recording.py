"""Statistics of what linears are given."""

from __future__ import annotations

import torch

from pegboard.quantizing.recording import Book, batches


def test_moments_are_means_over_all_calls() -> None:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    book = Book()
    book.note("a", x)
    assert book.close("a") is None, "it was not asked for"
    book.open(["a"])
    with torch.inference_mode():  # as in a step
        for part in x.split((7, 20, 3)):
            book.note("a", part)
            book.note("b", part)
    found = book.close("a")
    assert found is not None
    torch.testing.assert_close(found.moment, x.T @ x / 30)
    torch.testing.assert_close(found.magnitude, x.abs().mean(0))
    assert book.close("b") is None
    book.note("a", x)
    assert book.close("a") is None, "it was closed"


def test_batches_stay_within_the_budget() -> None:
    names = [("a", 10), ("b", 10), ("c", 20), ("d", 10)]
    assert batches(names, 800) == [["a", "b"], ["c"], ["d"]]
    assert batches(names, 10_000) == [["a", "b", "c", "d"]]
    assert batches([], 1) == []
