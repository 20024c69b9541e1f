"""All tool call formats. Parsers have the names that vLLM uses."""

from __future__ import annotations

from dataclasses import replace

from . import json_formats
from .format import ToolCallFormat
from .json_formats import HARMONY as HARMONY
from .pythonic_calls import PythonicFormat
from .xml_calls import XMLFormat

QWEN3_CODER = XMLFormat(
    parsers=("qwen3_coder", "qwen3_xml", "mimo"),
    template_markers=("<tool_call>", "<function="),
    start_markers=("<tool_call>", "<function="),
    end_markers=("</tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>"),
    name_start="<function=",
    name_end=">",
    parameter=("<parameter=", ">"),
    value_end="</parameter>",
    close="</function>",
    trim_newlines=True,
    call_start=("<tool_call>\n<function=", ">\n"),
    call_end="</function>\n</tool_call>",
    separator="\n",
)
"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder."""

SEED_OSS = replace(
    QWEN3_CODER,
    parsers=("seed_oss",),
    template_markers=("<seed:tool_call>",),
    start_markers=("<seed:tool_call>",),
    end_markers=("</seed:tool_call>",),
    marker_tokens=("<seed:tool_call>", "</seed:tool_call>"),
    trim_newlines=False,
    call_start=("<seed:tool_call>\n<function=", ">\n"),
    call_end="</function>\n</seed:tool_call>",
)
"""Same as ``QWEN3_CODER``, but in ``<seed:tool_call>`` and without line breaks around values: Seed-OSS."""

MINIMAX_M2 = XMLFormat(
    parsers=("minimax_m2",),
    template_markers=("minimax:tool_call",),
    start_markers=("<minimax:tool_call>",),
    end_markers=("</minimax:tool_call>",),
    marker_tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    name_start='<invoke name="',
    name_end='">',
    parameter=('<parameter name="', '">'),
    value_end="</parameter>",
    close="</invoke>",
    prefix="<minimax:tool_call>\n",
    call_start=('<invoke name="', '">\n'),
    call_end="</invoke>",
    separator="\n",
    suffix="\n</minimax:tool_call>",
)
"""``<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter></invoke> … </minimax:tool_call>``:
MiniMax-M2."""

GLM47 = XMLFormat(
    parsers=("glm47", "glm45"),
    template_markers=("<tool_call>", "</arg_key><arg_value>"),
    start_markers=("<tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    parameter=("<arg_key>", "</arg_key>"),
    value_start="<arg_value>",
    value_end="</arg_value>",
    close="</tool_call>",
    line="",
    call_start=("<tool_call>", ""),
    call_end="</tool_call>",
)
"""``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.7."""

GLM45 = replace(
    GLM47,
    template_markers=("<tool_call>", "<arg_key>"),
    line="\n",
    call_start=("<tool_call>", "\n"),
    separator="\n",
)
"""Same as ``GLM47``, but each element is on a line: GLM-4.5 and 4.6. Both parsers read both formats."""

PYTHONIC = PythonicFormat(
    parsers=("pythonic", "llama4_pythonic"),
    template_markers=("func_name1(params_name1=",),
    start_markers=("<|python_start|>", "<|python_tag|>"),
    end_markers=("<|python_end|>",),
    marker_tokens=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
    allow_unmarked=True,
    prefix="[",
    call_start=("", "("),
    call_end=")",
    separator=", ",
    suffix="]",
)
"""``[name(key="value"), …]`` at the beginning of the answer, or between Llama 4's tokens: Llama 3.2 and 4, ToolACE."""

OLMO3 = replace(
    PYTHONIC,
    parsers=("olmo3",),
    template_markers=("<function_calls>",),
    start_markers=("<function_calls>",),
    end_markers=("</function_calls>",),
    marker_tokens=("<function_calls>", "</function_calls>"),
    allow_unmarked=False,
    in_list=False,
    prefix="<function_calls>",
    separator="\n",
    suffix="</function_calls>",
)
"""``<function_calls>name(key="value")</function_calls>``, each call on a line: OLMo 3."""

LFM2 = replace(
    PYTHONIC,
    parsers=("lfm2",),
    template_markers=("<|tool_call_start|>",),
    start_markers=("<|tool_call_start|>",),
    end_markers=("<|tool_call_end|>",),
    marker_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    allow_unmarked=False,
    prefix="<|tool_call_start|>[",
    suffix="]<|tool_call_end|>",
)
"""``<|tool_call_start|>[name(key="value"), …]<|tool_call_end|>``: LFM2."""

TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = (
    *json_formats.FORMATS,
    QWEN3_CODER,
    SEED_OSS,
    MINIMAX_M2,
    GLM47,
    GLM45,
    PYTHONIC,
    OLMO3,
    LFM2,
)


def tool_call_format(parser: str, template: str) -> ToolCallFormat | None:
    """Find a format by parser name; ``auto``: by the markers in the chat template. None if no format matches."""
    formats = [form for form in TOOL_CALL_FORMATS if parser in ("auto", *form.parsers)]
    result = next((form for form in formats if form.matches(template)), None)
    return result if result or parser == "auto" else formats[-1]
