"""Text and tokens: tokenizers, incremental detokenization, stop strings, chat templates, response parsers.

This package does not import torch.
"""

from .chat_template import ChatTemplate, continued_text
from .message import Message, MessagePart, TextPart, ToolCall
from .reasoning import ReasoningFormat, ReasoningStage, initial_stage, reasoning_format
from .response_parser import ParserConfig, ResponseParser
from .stop_strings import StopStrings
from .tokenizer import Detokenizer, Tokenizer
from .tool_calls import (
    CallFormat,
    ToolCallFormat,
    ToolCallParser,
    answer_or_calls_tag,
    call_format,
    forced_call_tag,
    tool_call_format,
    triggered_call_tag,
)
