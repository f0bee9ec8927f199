"""Rows for the sequences that run, shared by the policies: decode first, then prefill chunks, preemption for pages."""

from __future__ import annotations

from pegboard.scheduling import Ledger, Sequence, StepBuilder


def plan_running(ledger: Ledger, step: StepBuilder, chunk: int | None) -> None:
    """Give every running sequence its row, best rank first, as far as tokens and pages go."""
    prefilling = []
    for seq in ledger.running:
        if seq.paused or seq.phase != "running":
            continue
        wants = seq.wants()
        if wants > 1:
            prefilling.append(seq)
        elif wants == 1 and step.tokens_left:
            drafts = 0
            if seq.spec.max_drafts and not seq.opening_due:
                drafts = min(seq.drafts(), ledger.need.decode_width - 1, step.tokens_left - 1)
            if not step.add(seq, 1 + drafts, drafts):
                _add_with_room(ledger, step, seq, 1)
    for seq in prefilling:
        if not step.tokens_left:
            break
        if seq.phase == "running":
            _add_with_room(ledger, step, seq, prefill_limit(step, chunk, seq.wants()))


def prefill_limit(step: StepBuilder, chunk: int | None, wants: int) -> int:
    return min(wants, step.tokens_left, chunk or wants)


def _add_with_room(ledger: Ledger, step: StepBuilder, seq: Sequence, query: int) -> None:
    """Add the row, preempting for its pages whoever ranks below. When nobody does it waits: those above go on and end,
    so its pages come. The first of all finds the whole cache once the others are preempted, so somebody always runs."""
    while not step.add(seq, query):
        if ledger.cache.stats().fenced:
            # Pages are on their way back; a preemption now could be one too many.
            return
        victim = _victim(ledger, step, seq)
        if victim is None:
            return
        ledger.preempt(victim)


def _victim(ledger: Ledger, step: StepBuilder, seq: Sequence) -> Sequence | None:
    """A paused sequence, else the lowest-ranked one that has no row in this step."""
    lowest = None
    for other in ledger.running.backwards():
        if other is seq or step.planned(other):
            continue
        if other.paused:
            return other
        if lowest is None and other.key > seq.key:
            lowest = other
    return lowest


def free_a_slot(ledger: Ledger) -> None:
    """A paused sequence gives its slot and pages to who waits, when no slot is free."""
    if ledger.starved:
        for other in ledger.running.backwards():
            if other.paused:
                ledger.preempt(other)
                return


def preempt_paused(ledger: Ledger) -> bool:
    """When only paused sequences hold pages, one of them gives its own to who waits."""
    if ledger.active or ledger.cache.stats().fenced:
        return False
    for other in ledger.running.backwards():
        ledger.preempt(other)
        return True
    return False
