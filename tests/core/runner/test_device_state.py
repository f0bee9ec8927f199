"""Page tables and dropped entries by slot, as the host tells them."""

from __future__ import annotations

import pytest
import torch

from pegboard.contracts.cache import CacheGroup, KVLayout
from pegboard.contracts.scheduler import SlotPages
from pegboard.runner.device_state import DeviceState


@pytest.fixture
def state() -> DeviceState:
    groups = [
        CacheGroup(index=index, kind="full", layers=(index,), layout=KVLayout(name="n", tensors=()), page_bytes=1)
        for index in range(2)
    ]
    return DeviceState(groups, 3, 64, 16, 1, "cpu")


def test_pages_stand_where_they_were_told(state: DeviceState) -> None:
    state.apply([SlotPages(slot=1, group=0, start=0, pages=(7, 8)), SlotPages(slot=2, group=1, start=1, pages=(9,))])
    state.apply([SlotPages(slot=1, group=0, start=1, pages=(5, 6)), SlotPages(slot=1, group=0, start=2, pages=(4,))])
    assert state.tables[0].tolist() == [[0, 0, 0, 0], [7, 5, 4, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert state.tables[1].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 9, 0, 0], [0, 0, 0, 0]]
    assert [table.dtype for table in state.tables] == [torch.int32] * 2


def test_dropped_entries_are_those_told_last(state: DeviceState) -> None:
    def tell(slot: int, dropped: int, group: int = 0) -> list[list[int]]:
        state.apply([SlotPages(slot=slot, group=group, start=0, pages=(), dropped=dropped)])
        return [dropped.tolist() for dropped in state.dropped]

    assert tell(1, 0) == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert tell(1, 32) == [[0, 32, 0, 0], [0, 0, 0, 0]]
    assert tell(2, 16, group=1) == [[0, 32, 0, 0], [0, 0, 16, 0]]
    assert tell(1, 32) == [[0, 32, 0, 0], [0, 0, 16, 0]]
    assert tell(1, 0) == [[0, 0, 0, 0], [0, 0, 16, 0]]
