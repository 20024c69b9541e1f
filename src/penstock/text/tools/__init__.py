"""Tool calls: the forms in which models write them, read from their texts, and made where they must be."""

from .forms import FORMS, Form, tool_form
from .grammar import grammar_of
from .parser import ToolCall, ToolCalls

__all__ = ["FORMS", "Form", "ToolCall", "ToolCalls", "grammar_of", "tool_form"]
