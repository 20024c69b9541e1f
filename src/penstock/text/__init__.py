"""Text and tokens: encoding, decoding as tokens come, stop strings, chat templates, and answers taken
apart. No torch."""

from .chat_template import ChatTemplate
from .detokenizer import Detokenizer
from .reasoning import Stage, ThoughtForm, stage_of, thought_form
from .response_parser import Message, Reader, Reading
from .stop_strings import StopStrings
from .tokenizer import Tokenizer
from .tool_calls import Form, ToolCall, ToolCalls, forced_calls, tool_form

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Form",
    "Message",
    "Reader",
    "Reading",
    "Stage",
    "StopStrings",
    "ThoughtForm",
    "Tokenizer",
    "ToolCall",
    "ToolCalls",
    "forced_calls",
    "stage_of",
    "thought_form",
    "tool_form",
]
