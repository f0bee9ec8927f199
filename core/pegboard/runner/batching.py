"""From a StepPlan's rows to the device's Batch: packed on the host into one vector, unpacked on the device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from pegboard.contracts.batch import Batch, Bounds, Rows
from pegboard.contracts.ops import Ops, SlotTables
from pegboard.contracts.scheduler import RowPlan

from .device_state import DeviceState
from .drafting import Drafting
from .step_shape import Limits, StepShape


def _sections(shape: StepShape) -> dict[str, int]:
    """What the host tells the device, and how many numbers of each. By row its slot, the tokens by which it grows, and
    where it starts; by token its slot, position and id; by choice the token that it follows, and its slot.

    With drafts a token's place in its row as well.

    -1 stands for what the device knows by slot; position -1 - i for the i-th after that, id -2 - i for the i-th draft.
    With drafts a row's choices follow its last token and each draft; `verify_start` says where they begin."""
    rows, tokens = shape.rows, shape.tokens
    told = {"slots": rows, "advance": rows}
    if shape.chain:
        return told if shape.known == "none" else told | {"starts": rows, "ids": rows}
    told |= {"starts": rows, "query_start": rows + 1, "token_slots": tokens, "positions": tokens, "ids": tokens}
    if shape.drafts:
        told |= {"places": tokens, "verify_start": shape.verified + 1}
    return told | {"last": shape.samples, "sample_slots": shape.verified or shape.samples}


def _laid_out(shape: StepShape) -> tuple[dict[str, slice], int]:
    """Where each section lies, and the numbers in all. Each starts at a multiple of 16 bytes: kernels are compiled once
    more for addresses that don't."""
    places, at = {}, 0
    for name, count in _sections(shape).items():
        places[name] = slice(at, at + count)
        at += count + count % 2
    return places, at


def most_packed(limits: Limits) -> int:
    """Numbers that `pack` gives at most."""
    rows, tokens = 2 * limits.rows, limits.rows * limits.decode_width + limits.step_tokens
    sections = 10
    return 4 * rows + 1 + 5 * tokens + 3 * limits.rows + sections


def pack(rows: Sequence[RowPlan], decode_rows: int, shape: StepShape, idle: int) -> NDArray[numpy.int64]:
    """The sections one after another. The first `decode_rows` rows are decode rows; what is idle has the slot `idle`,
    and does not grow."""
    if shape.chain and shape.known == "none":
        return _pack_going_on(rows, shape.rows, idle)
    places_of, count = _laid_out(shape)
    packed = numpy.full(count, -1, dtype=numpy.int64)
    parts = {name: packed[place] for name, place in places_of.items()}
    padded = 0 if shape.decode is None else shape.decode.rows
    places = [*range(decode_rows), *range(padded, padded + len(rows) - decode_rows)]
    parts["slots"][:] = idle
    parts["slots"][places] = [row.slot for row in rows]
    parts["advance"][:] = 0
    width = 0 if not shape.drafts or shape.decode is None else shape.decode.min_query
    parts["advance"][places] = [max(row.query, width) for row in rows]
    if "starts" in parts:
        parts["starts"][places] = [row.start if row.tokens else -1 for row in rows]
    if not shape.chain:
        _pack_tokens(rows, places, padded, width, idle, parts)
    elif "ids" in parts:
        parts["ids"][: len(rows)] = [row.tokens[0] if row.tokens else -1 for row in rows]
    return packed


def first_tokens(rows: Sequence[RowPlan], decode_rows: int, shape: StepShape) -> list[int]:
    """Where the rows' tokens begin among those of the step."""
    width = 0 if not shape.drafts or shape.decode is None else shape.decode.min_query
    first, at = [], 0
    for index, row in enumerate(rows):
        if index == decode_rows:
            at = shape.decode_tokens  # idle rows fill the decode rows up
        first.append(at)
        at += max(row.query, width) if index < decode_rows else row.query
    return first


def _pack_going_on(rows: Sequence[RowPlan], padded: int, idle: int) -> NDArray[numpy.int64]:
    """slots and advance of the most common steps."""
    advance, count = padded + padded % 2, len(rows)
    packed = numpy.zeros(2 * advance, dtype=numpy.int64)
    packed[:count] = [row.slot for row in rows]
    packed[count:padded] = idle
    packed[advance : advance + count] = 1
    return packed


def _pack_tokens(
    rows: Sequence[RowPlan],
    places: Sequence[int],
    padded: int,
    width: int,
    idle: int,
    parts: dict[str, NDArray[numpy.int64]],
) -> None:
    """`width`: queries that a decode row has at least; those that are not its own are idle."""
    counts = numpy.zeros(len(parts["slots"]), dtype=numpy.int64)
    counts[:padded] = max(width, 1)  # an idle decode row has tokens, as its neighbours have
    counts[places] = [max(row.query, width) for row in rows]
    parts["query_start"][0] = 0
    parts["query_start"][1:] = numpy.cumsum(counts)
    first = parts["query_start"][places].tolist()
    parts["token_slots"][:] = parts["sample_slots"][:] = idle
    for row, at in zip(rows, first, strict=True):
        inside = numpy.arange(row.query)
        parts["token_slots"][at : at + row.query] = row.slot
        parts["positions"][at : at + row.query] = row.start + inside if row.tokens else -1 - inside
        parts["ids"][at : at + len(row.tokens)] = row.tokens
        if row.drafts:
            parts["ids"][at + row.query - row.drafts : at + row.query] = -2 - inside[: row.drafts]
        parts["ids"][at + row.query : at + width] = -2  # the idle slot has no drafts
        if "places" in parts:
            parts["places"][at : at + row.query] = inside
    if "verify_start" in parts:
        _pack_choices(rows, first, parts)
        return
    chosen = [(at + row.query - 1, row.slot) for row, at in zip(rows, first, strict=True) if row.samples]
    parts["last"][:] = chosen[-1][0] if chosen else 0
    if chosen:
        parts["last"][: len(chosen)], parts["sample_slots"][: len(chosen)] = zip(*chosen, strict=True)


def _pack_choices(rows: Sequence[RowPlan], first: Sequence[int], parts: dict[str, NDArray[numpy.int64]]) -> None:
    if len(parts["last"]) == len(parts["ids"]):  # every token is followed by a choice, idle ones too
        parts["last"][:] = numpy.arange(len(parts["last"]))
        parts["sample_slots"][: len(rows)] = [row.slot for row in rows]
        parts["verify_start"][:] = parts["query_start"]
        return
    choosing = [(row, at) for row, at in zip(rows, first, strict=True) if row.samples]
    last = [at + row.query - row.drafts - 1 + place for row, at in choosing for place in range(1 + row.drafts)]
    parts["last"][:] = last
    parts["sample_slots"][:] = [row.slot for row, _ in choosing]
    parts["verify_start"][0] = 0
    parts["verify_start"][1:] = numpy.cumsum([1 + row.drafts for row, _ in choosing])


class Verifying(msgspec.Struct, frozen=True):
    """Where the N choosing rows' queries begin among the S choices [N + 1] int32, the ids of these [S], -1 for no
    draft, and where drafts are trees their parents [S] (see VerifyRows)."""

    query_start: Tensor
    ids: Tensor
    parents: Tensor | None = None


class Assembled:
    """A Batch, and what the rest of the step needs: slots and ends [R]; outputs [S], the tokens that choices follow,
    None: every one; sample_slots and sample_positions [S], with drafts [N], of each row and its first choice."""

    def __init__(
        self,
        batch: Batch,
        *,
        slots: Tensor,
        ends: Tensor,
        outputs: Tensor | None,
        sample_slots: Tensor,
        sample_positions: Tensor,
        verifying: Verifying | None = None,
    ) -> None:
        self.batch = batch
        self.slots, self.ends = slots, ends
        self.outputs, self.sample_slots, self.sample_positions = outputs, sample_slots, sample_positions
        self.verifying = verifying


def unpack(
    vector: Tensor, shape: StepShape, state: DeviceState, ops: Ops, drafting: Drafting | None = None
) -> Assembled:
    """vector: as `pack` made it, on the device. What is launched depends on the shape alone."""
    parts = {name: vector[place] for name, place in _laid_out(shape)[0].items()}
    if shape.chain and shape.known == "none" and all(group.kind != "state" for group in state.groups):
        return _going_on(parts["slots"], parts["advance"], shape, state, ops)
    slots, token_slots = parts["slots"], parts.get("token_slots", parts["slots"])
    starts, ids, positions = _places(parts, slots, token_slots, shape, state)
    ends = starts + parts["advance"]
    last, verifying, chosen = parts.get("last"), None, parts.get("sample_slots", slots)
    entries, ancestors = positions, None
    follows = positions if last is None else positions[last]
    if shape.drafts:
        assert last is not None  # a step with drafts is no chain
        begin = parts["verify_start"]
        first = last[begin[:-1]]
        follows = positions[first]
        if drafting is not None and drafting.inside:
            drafting.propose(chosen, ids[first], follows, shape.drafts)
        index, drafts = (token_slots, (-2 - ids).clamp_(min=0)), ids < -1
        ids, parents = torch.where(drafts, state.drafts[index], ids), None
        if state.trees is not None:
            places, trees = parts["places"], state.trees
            parents = torch.where(drafts, trees.parents[index], -1)[last]
            chain = (2 << places.clamp(0, 61)) - 1
            ancestors = torch.where(drafts, trees.ancestors[index], chain)
            positions = positions - torch.where(drafts, places - trees.depths[index], 0)
        verifying = Verifying(begin.to(torch.int32), ids[last], parents)
        ids = ids.clamp(min=0)  # no draft is token 0, which nobody accepts
    return Assembled(
        _batch(shape, state, ids, positions, entries, ends, slots, token_slots, parts.get("query_start"), ancestors),
        slots=slots,
        ends=ends,
        outputs=last,
        sample_slots=chosen,
        sample_positions=follows + 1,
        verifying=verifying,
    )


def _going_on(slots: Tensor, advance: Tensor, shape: StepShape, state: DeviceState, ops: Ops) -> Assembled:
    """Most steps: each row has one token, which the device knows alone."""
    own = shape.decode
    assert own is not None  # rows that the device feeds are decode rows
    located = [
        ops.locate(
            slots,
            advance,
            SlotTables(
                lengths=state.lengths,
                last_ids=state.last_ids,
                pages=table,
                dropped=dropped,
                page_size=state.page_size,
            ),
            _reached(own, table, state.page_size),
        )
        for table, dropped in zip(state.tables, state.dropped, strict=True)
    ]
    first, starts = located[0], state.counting[: own.rows + 1]
    rows = tuple(_rows(own, slots, found.kv_len, starts, found.page_table) for found in located)
    batch = Batch(
        ids=first.ids,
        positions=first.positions,
        write_index=tuple(found.write_index for found in located),
        state_page=(None,) * len(located),
        decode=rows,
        prefill=None,
        decode_tokens=own.tokens,
        bounds=own,
    )
    return Assembled(batch, slots=slots, ends=first.ends, outputs=None, sample_slots=slots, sample_positions=first.ends)


def _places(
    parts: dict[str, Tensor], slots: Tensor, token_slots: Tensor, shape: StepShape, state: DeviceState
) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows start [R], ids and positions of the tokens [T]: told, or what the device knows."""
    if shape.chain and shape.known == "none":
        starts = state.lengths[slots]
        return starts, state.last_ids[slots], starts
    starts, ids = parts["starts"], parts["ids"]
    if shape.known != "all":
        starts = torch.where(starts < 0, state.lengths[slots], starts)
        ids = torch.where(ids == -1, state.last_ids[token_slots], ids)
    if shape.chain:
        return starts, ids, starts
    positions = parts["positions"]
    if shape.known != "all":
        positions = torch.where(positions < 0, state.lengths[token_slots] - 1 - positions, positions)
    return starts, ids, positions


def _batch(
    shape: StepShape,
    state: DeviceState,
    ids: Tensor,
    positions: Tensor,
    places: Tensor,
    ends: Tensor,
    slots: Tensor,
    token_slots: Tensor,
    query_start: Tensor | None,
    ancestors: Tensor | None,
) -> Batch:
    """`places` [T]: where tokens are written, which in a tree of drafts is not where they stand. `ancestors` [T]: of
    queries of decode rows, as bits; None: those before them."""
    size, decode_rows = state.page_size, 0 if shape.decode is None else shape.decode.rows
    write_index: list[Tensor] = []
    state_page: list[Tensor | None] = []
    decode: list[Rows] = []
    prefill: list[Rows] = []
    if query_start is None:
        decode_starts = prefill_starts = state.counting[: shape.rows + 1]
    else:
        decode_starts = query_start[: decode_rows + 1].to(torch.int32)
        prefill_starts = (query_start[decode_rows:] - shape.decode_tokens).to(torch.int32)
    phases = (
        (decode, shape.decode, slice(0, decode_rows), decode_starts),
        (prefill, shape.prefill, slice(decode_rows, shape.rows), prefill_starts),
    )
    for group, table, dropped in zip(state.groups, state.tables, state.dropped, strict=True):
        stateful, width = group.kind == "state", table.shape[1]
        state_page.append(table[slots, 0].long() if stateful else None)
        if stateful:
            write_index.append(table[token_slots, 0].long())
        else:
            entries = places - dropped[token_slots]
            page = table.view(-1)[token_slots * width + entries // size].long()
            write_index.append(page * size + entries % size)
        kv_len = (ends - dropped[slots]).to(torch.int32)
        for phase, own, where, starts in phases:
            if own is not None:
                pages = width if stateful else _reached(own, table, size)
                masks = ancestors if phase is decode else None
                phase.append(_rows(own, slots[where], kv_len[where], starts, table[slots[where], :pages], masks))
    return Batch(
        ids=ids,
        positions=positions,
        write_index=tuple(write_index),
        state_page=tuple(state_page),
        decode=tuple(decode) or None,
        prefill=tuple(prefill) or None,
        decode_tokens=shape.decode_tokens,
        bounds=shape.bounds,
    )


def _reached(bounds: Bounds, table: Tensor, page_size: int) -> int:
    """Pages that rows can have entries in."""
    return min(-(-bounds.max_kv // page_size), table.shape[1])


def _rows(
    bounds: Bounds, slots: Tensor, kv_len: Tensor, starts: Tensor, page_table: Tensor, ancestors: Tensor | None = None
) -> Rows:
    return Rows(
        query_start=starts,
        kv_len=kv_len,
        page_table=page_table,
        row_slot=slots,
        ancestors=None if ancestors is None else ancestors[: bounds.tokens],
        bounds=bounds,
    )
