"""From a StepPlan's rows to the device's Batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.contracts.batch import Batch, Bounds, Rows
from pegboard.contracts.scheduler import RowPlan

from .device_state import DeviceState


def _bounds(rows: Sequence[RowPlan]) -> Bounds:
    queries = [row.query for row in rows]
    return Bounds(
        rows=len(rows),
        tokens=sum(queries),
        max_query=max(queries),
        min_query=min(queries),
        max_kv=max(row.start + row.query for row in rows),
    )


class Assembled:
    """A Batch, and the device tensors that the rest of the step needs: slots [R], starts [R], query_start [R+1]."""

    def __init__(self, batch: Batch, slots: Tensor, starts: Tensor, query_start: Tensor) -> None:
        self.batch = batch
        self.slots = slots
        self.starts = starts
        self.query_start = query_start


def assemble(rows: Sequence[RowPlan], state: DeviceState, decode_width: int) -> Assembled:
    """Rows with at most `decode_width` queries must come first."""
    decode_rows = 0
    while decode_rows < len(rows) and rows[decode_rows].query <= decode_width:
        decode_rows += 1
    bounds = _bounds(rows)
    counts = [row.query for row in rows]
    slots = state.upload([row.slot for row in rows], torch.int64)
    query = state.upload(counts, torch.int64)
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    query_start = state.upload(offsets, torch.int64)
    row_of = torch.repeat_interleave(query, output_size=bounds.tokens)
    inside = torch.arange(bounds.tokens, device=state.device) - query_start[row_of]

    # Rows whose input the host doesn't know start where the device says.
    known = [row.start if row.tokens else -1 for row in rows]
    starts = state.upload(known, torch.int64)
    fed = not all(row.tokens for row in rows)
    if fed:
        starts = torch.where(starts < 0, state.lengths[slots], starts)
    ids = state.upload([t for row in rows for t in (*row.tokens, *(-1,) * (row.query - len(row.tokens)))], torch.int64)
    if fed:
        ids = torch.where(ids < 0, state.last_ids[slots][row_of], ids)

    positions = starts[row_of] + inside
    token_slots = slots[row_of]
    size = state.page_size
    write_index: list[Tensor] = []
    state_page: list[Tensor | None] = []
    decode: list[Rows] = []
    prefill: list[Rows] = []
    decode_tokens = offsets[decode_rows]
    phases = ((decode, 0, decode_rows, 0), (prefill, decode_rows, len(rows), decode_tokens))
    for group, table, dropped in zip(state.groups, state.tables, state.dropped, strict=True):
        stateful, width = group.kind == "state", table.shape[1]
        state_page.append(table[slots, 0].long() if stateful else None)
        if stateful:
            write_index.append(table[token_slots, 0].long())
        else:
            entries = positions - dropped[token_slots]
            write_index.append(table.view(-1)[token_slots * width + entries // size].long() * size + entries % size)
        kv_len = (starts + query - dropped[slots]).to(torch.int32)
        for phase, first, last, token in phases:
            if first < last:
                own = _bounds(rows[first:last])
                pages = width if stateful else min(-(-own.max_kv // size), width)
                phase.append(
                    Rows(
                        query_start=(query_start[first : last + 1] - token).to(torch.int32),
                        kv_len=kv_len[first:last],
                        page_table=table[slots[first:last], :pages],
                        row_slot=slots[first:last],
                        ancestors=None,
                        bounds=own,
                    )
                )
    batch = Batch(
        ids=ids,
        positions=positions,
        write_index=tuple(write_index),
        state_page=tuple(state_page),
        decode=tuple(decode) or None,
        prefill=tuple(prefill) or None,
        decode_tokens=decode_tokens,
        bounds=bounds,
    )
    return Assembled(batch, slots, starts, query_start)
