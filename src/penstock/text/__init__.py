"""Text and tokens: tokenizers, incremental detokenization, stop strings, chat templates, and parsers of answers. No
torch."""

from .chat_template import ChatTemplate
from .detokenizer import Detokenizer
from .reasoning import ReasoningFormat, ReasoningStage, initial_stage, reasoning_format
from .response_parser import Message, ParserConfig, ResponseParser
from .stop_strings import StopStrings
from .tokenizer import Tokenizer
from .tool_calls import ToolCall, ToolCallFormat, ToolCallParser, forced_call_tag, tool_call_format

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Message",
    "ParserConfig",
    "ReasoningFormat",
    "ReasoningStage",
    "ResponseParser",
    "StopStrings",
    "Tokenizer",
    "ToolCall",
    "ToolCallFormat",
    "ToolCallParser",
    "forced_call_tag",
    "initial_stage",
    "reasoning_format",
    "tool_call_format",
]
