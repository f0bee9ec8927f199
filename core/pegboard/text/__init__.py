"""Text to ids and back: tokenizer, incremental detokenizer, stop strings, chat templates."""

from .chat import render_chat
from .chat_prompt import encode_chat, render_prompt
from .detokenizer import IncrementalDetokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from .vocabulary_files import no_tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "StopMatcher",
    "Tokenizer",
    "encode_chat",
    "has_tokenizer",
    "load_tokenizer",
    "no_tokenizer",
    "render_chat",
    "render_prompt",
]
