"""Text and tokens: encoding, decoding as tokens come, stop strings, chat templates, and answers taken
apart. No torch."""

from .detokenizer import Detokenizer
from .reader import Message, Reader, Reading
from .stops import StopStrings
from .template import ChatTemplate
from .thoughts import Stage, ThoughtForm, stage_of, thought_form
from .tokenizer import Tokenizer
from .tools import Form, ToolCall, ToolCalls, forced_calls, tool_form

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
