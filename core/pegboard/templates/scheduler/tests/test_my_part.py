from __future__ import annotations

from pegboard import SamplingParams
from pegboard.contracts.scheduler import SequenceSpec
from pegboard.testing import SchedulerSuite, isolated_engine

import my_part
from my_part.options import Options
from my_part.scheduler import MyPart


class TestMyPart(SchedulerSuite):
    """The contract: every policy must give each sequence the tokens that it gets alone."""

    part = my_part.pegboard_parts()[0]
    claims = ("preemption", "priorities")


def sequence(id: str, length: int, arrival: float) -> SequenceSpec:
    prompt = tuple(range(length))
    return SequenceSpec(id=id, prompt=prompt, sampling=SamplingParams(), seed=0, max_length=length + 4, arrival=arrival)


def test_short_prompts_rank_first_until_a_long_one_has_waited() -> None:
    ranked = MyPart.__new__(MyPart)  # `rank` needs the options only
    ranked.options = Options(ageing=10.0)
    assert ranked.rank(sequence("short", 5, 0.0)) < ranked.rank(sequence("long", 50, 0.0))
    assert ranked.rank(sequence("short", 5, 9.0)) > ranked.rank(sequence("long", 50, 0.0))


def test_an_engine_uses_it(model: str) -> None:
    with isolated_engine(model, plugins=[my_part], scheduler="my-part") as engine:
        assert engine.plan.parts["scheduler"].name == "my-part"
        greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        together = engine.generate([list(range(3, 40)), [5, 6]], greedy)
        [alone] = engine.generate([[5, 6]], greedy)
    assert together[1].token_ids == alone.token_ids
