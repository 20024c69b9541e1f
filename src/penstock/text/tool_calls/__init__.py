"""Tool calls: the forms in which models write them, read from their texts, and made where they must be."""

from .forced import forced_calls
from .forms import FORMS, Form, tool_form
from .parser import ToolCall, ToolCalls

__all__ = ["FORMS", "Form", "ToolCall", "ToolCalls", "forced_calls", "tool_form"]
