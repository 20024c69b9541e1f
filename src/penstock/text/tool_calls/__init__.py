"""Tool calls: formats, incremental parsers, and structural tags that force calls."""

from .format import Schemas, ToolCallFormat, ToolCallParser
from .formats import HARMONY, TOOL_CALL_FORMATS, tool_call_format
from .structural_tag import CallFormat, answer_or_calls_tag, call_format, forced_call_tag, triggered_call_tag
