from __future__ import annotations

from pegboard import SamplingParams
from pegboard.testing import CacheSuite, isolated_engine

import my_part
from my_part.pages import Pages


class TestMyPart(CacheSuite):
    """The contract: who holds which page, when it comes back, what the device learns."""

    part = my_part.pegboard_parts()[0]


def test_the_lowest_page_goes_first() -> None:
    pages = Pages(5)
    assert [pages.take() for _ in range(4)] == [1, 2, 3, 4]
    pages.drop(3, fence=7)
    pages.drop(1, fence=0)
    assert pages.take() == 1
    pages.retire(7)
    assert [pages.take(), pages.take()] == [3, 5]


def test_an_engine_uses_it(model: str) -> None:
    options = {"use": "my-part", "options": {"max_pages": 20}}
    with isolated_engine(model, plugins=[my_part], cache=options, max_length=64) as engine:
        assert engine.plan.parts["cache"].name == "my-part"
        assert engine.plan.pages == (21,)
        greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        outputs = engine.generate([[5, 6, 7], list(range(3, 40))] * 8, greedy)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in outputs[:2]] * 8
