"""Text and tokens: encoding, decoding as tokens come, stop strings, chat templates. No torch."""

from .detokenizer import Detokenizer
from .stops import StopStrings
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .tool_calls import ToolCall, ToolCalls, grammar_of

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer", "ToolCall", "ToolCalls", "grammar_of"]
