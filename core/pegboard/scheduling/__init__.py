"""What schedulers are made of: the ledger keeps the books, a policy decides who runs and how much.

A scheduler derives from `LedgerScheduler`; its `schedule` reads `ledger.running` and `ledger.next_waiting()`, adds rows
to the `StepBuilder` of `ledger.begin()` and returns `ledger.launch(step)`.
"""

from __future__ import annotations

from .base import LedgerScheduler
from .ledger import Ledger
from .sequence import Sequence
from .step import StepBuilder

__all__ = ["Ledger", "LedgerScheduler", "Sequence", "StepBuilder"]
