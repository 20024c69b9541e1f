"""Tool calls: the forms in which models write them, read from their texts, and made where they must be."""

from .formats import FORMS, ToolCallFormat, tool_call_format
from .parser import ToolCall, ToolCallParser
from .structural_tag import forced_call_tag

__all__ = ["FORMS", "ToolCall", "ToolCallFormat", "ToolCallParser", "forced_call_tag", "tool_call_format"]
