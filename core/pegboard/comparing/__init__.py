"""Two configs on the same prompts: where their numbers part first, which tokens differ, how fast each is."""

from .prompts import BUILT_IN, read_prompts
from .report import Comparison, PartError, Side, Speed, Tokens
from .run import compare

__all__ = ["BUILT_IN", "Comparison", "PartError", "Side", "Speed", "Tokens", "compare", "read_prompts"]
