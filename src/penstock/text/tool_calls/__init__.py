"""Tool calls: the formats in which models write them, their parsers, and a structural tag that forces them."""

from .format import Schemas, ToolCallFormat, ToolCallParser
from .formats import HARMONY, TOOL_CALL_FORMATS, tool_call_format
from .structural_tag import forced_call_tag
