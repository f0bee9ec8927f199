"""Drafts that stand behind a text which has gone on as they said, and how far a draft model runs ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from pegboard import SamplingParams
from pegboard.contracts.sampler import SlotOpening
from pegboard.testing import SpeculatorSuite, tiny_model
from pegboard_sampling.speculation.draft_passes import DraftPasses
from pegboard_sampling.speculation.options import DraftModelOptions
from pegboard_sampling.speculation.pace import adjusted

HISTORIES: Mapping[int, Sequence[int]] = {
    0: (3, 4, 5),
    2: (9,) * 7,
    3: (1, 2, 3, 4, 5, 6, 7, 8),
    5: (11, 12),
    1: (6, 5),
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "model"
    return tiny_model(path, vocab_size=64, max_position_embeddings=96, num_hidden_layers=2, tokenizer=False)


def make(drafter: Path, texts: Mapping[int, Sequence[int]]) -> tuple[DraftPasses, torch.Tensor]:
    passes = DraftPasses(
        SpeculatorSuite.need(), DraftModelOptions(model=str(drafter), drafts=3, candidates=9, dtype="float32")
    )
    sampling = SamplingParams(temperature=0.8)
    passes.open(
        [
            SlotOpening(slot=slot, sampling=sampling, seed=40 + slot, prompt=tuple(text), max_length=64)
            for slot, text in texts.items()
        ]
    )
    return passes, torch.tensor(list(texts))


def test_drafts_stand_where_the_text_goes_on_as_they_said(drafter: Path) -> None:
    """Nothing, two drafts, all but one, one and another token, another token: what stands is what would be drafted for
    the new text, and so is what is drafted on behind it."""
    passes, slots = make(drafter, HISTORIES)
    assert passes.standing(slots).tolist() == [0] * 5
    passes.draft(slots, 3)
    assert passes.standing(slots).tolist() == [3] * 5
    passes.draft_on(slots, 3, 7)
    drafts = passes.standing_ids(slots, 7)
    other = (drafts[:, 1] + 1) % 64
    kept = [
        [],
        drafts[1, :2].tolist(),
        drafts[2, :6].tolist(),
        [int(drafts[3, 0]), int(other[3])],
        [(int(drafts[4, 0]) + 1) % 64],
    ]
    ids = torch.tensor([row + [-1] * (7 - len(row)) for row in kept])
    passes.observe(slots, ids, torch.tensor([len(row) for row in kept]))
    assert passes.standing(slots).tolist() == [7, 5, 1, 0, 0]
    texts = {slot: (*HISTORIES[slot], *row) for slot, row in zip(HISTORIES, kept, strict=True)}
    fresh, _ = make(drafter, texts)
    fresh.draft(slots, 7)
    expected = fresh.standing_ids(slots, 7)
    assert passes.standing_ids(slots, 7).tolist() == [
        [*row[:count], *[-1] * (7 - count)] for row, count in zip(expected.tolist(), (7, 5, 1, 0, 0), strict=True)
    ]
    passes.draft_on(slots[2:3], 1, 7)
    assert passes.standing_ids(slots[2:3], 7).tolist() == expected[2:3].tolist()
    passes.draft_on(slots[1:4], 5, 7)  # of which one has no five to go on from
    assert passes.standing_ids(slots[1:4], 7).tolist() == [*expected[1:3].tolist(), [-1] * 7]
    passes.draft(slots[3:], 7)
    assert passes.standing_ids(slots[3:], 7).tolist() == expected[3:].tolist()


def test_a_row_that_ran_beside_its_drafts_catches_up(drafter: Path) -> None:
    """Tokens that were chosen without drafts, one a step, some as drafted."""
    passes, slots = make(drafter, HISTORIES)
    passes.draft(slots, 3)
    first = passes.standing_ids(slots, 1)
    texts = {slot: list(text) for slot, text in HISTORIES.items()}
    for step in range(5):
        ids = first if step == 0 else torch.full_like(first, 7 * step)
        passes.observe(slots, ids, torch.ones_like(slots))
        for text, [token] in zip(texts.values(), ids.tolist(), strict=True):
            text.append(token)
    assert passes.standing(slots).tolist() == [0] * 5
    fresh, _ = make(drafter, texts)
    for one in (passes, fresh):
        one.draft(slots, 3)
    assert passes.standing_ids(slots, 3).tolist() == fresh.standing_ids(slots, 3).tolist()


@pytest.mark.parametrize(
    ("ahead", "span", "busy", "expected"),
    [
        (0, 1.9, 0.0, 0),  # two passes do not fit
        (0, 2.1, 0.0, 2),
        (0, 6.5, 0.0, 6),
        (3, 6.5, 3.0, 4),  # one at a time
        (4, 5.0, 4.0, 4),
        (4, 4.0, 4.0, 3),  # the target waits
        (2, 2.0, 2.0, 0),
    ],
)
def test_as_far_ahead_as_the_target_takes(ahead: int, span: float, busy: float, expected: int) -> None:
    assert adjusted(ahead, 0.5, 0.5 * span, 0.5 * busy) == expected
