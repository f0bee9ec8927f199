"""Text to ids and back: tokenizer, incremental detokenizer, stop strings, chat templates."""

from .chat import render_chat
from .chat_prompt import encode_chat, render_prompt
from .detokenizer import IncrementalDetokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "StopMatcher",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "render_chat",
    "render_prompt",
]
