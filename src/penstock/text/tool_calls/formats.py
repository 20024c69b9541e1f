"""All tool call formats. Parsers have the names that vLLM and SGLang use."""

from __future__ import annotations

from dataclasses import replace

from . import json_formats, xml_formats
from .format import ToolCallFormat
from .gemma_calls import GemmaFormat
from .json_formats import HARMONY as HARMONY
from .nested_calls import NestedFormat
from .pythonic_calls import PythonicFormat

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

LFM2_LIST = replace(LFM2, template_markers=("List of tools: ",))
"""Same as ``LFM2``, for templates that leave the calls to the content: LFM2 and 2.5."""

GEMMA4 = GemmaFormat(
    parsers=("gemma4",),
    template_markers=("<|tool_call>",),
    start_markers=("<|tool_call>",),
    end_markers=("<tool_call|>",),
    marker_tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    quote='<|"|>',
    call_start=("<|tool_call>call:", "{"),
    call_end="}<tool_call|>",
)
"""``<|tool_call>call:name{key:<|"|>value<|"|>,other:5}<tool_call|>`` for each call: Gemma 4."""

FUNCTIONGEMMA = replace(
    GEMMA4,
    parsers=("functiongemma",),
    template_markers=("<start_function_call>",),
    start_markers=("<start_function_call>",),
    end_markers=("<end_function_call>",),
    marker_tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    quote="<escape>",
    call_start=("<start_function_call>call:", "{"),
    call_end="}<end_function_call>",
)
"""``<start_function_call>call:name{key:<escape>value<escape>}<end_function_call>`` for each call: FunctionGemma."""

MINIMAX_M3 = NestedFormat(
    parsers=("minimax_m3", "minimax-m3"),
    template_markers=("]<]minimax[>[",),
    start_markers=("]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="'),
    end_markers=("]<]minimax[>[</tool_call>",),
    marker_tokens=("]<]minimax[>[",),
    mark="]<]minimax[>[",
    name_start='<invoke name="',
    name_end='">',
    close="</invoke>",
    string_stop="]<",
    prefix="]<]minimax[>[<tool_call>\n",
    call_start=(']<]minimax[>[<invoke name="', '">'),
    call_end="]<]minimax[>[</invoke>",
    separator="\n",
    suffix="\n]<]minimax[>[</tool_call>",
)
"""``<tool_call><invoke name="name"><key>value</key></invoke> … </tool_call>``, with ``]<]minimax[>[`` before each tag;
objects and arrays are nested elements: MiniMax-M3."""

TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = (
    *json_formats.FORMATS,
    *xml_formats.FORMATS,
    PYTHONIC,
    OLMO3,
    LFM2,
    LFM2_LIST,
    GEMMA4,
    FUNCTIONGEMMA,
    MINIMAX_M3,
)


def tool_call_format(parser: str, template: str) -> ToolCallFormat | None:
    """Find a format by parser name; ``auto``: by the markers in the chat template. None if no format matches."""
    formats = [form for form in TOOL_CALL_FORMATS if parser in ("auto", *form.parsers)]
    result = next((form for form in formats if form.matches(template)), None)
    return result if result or parser == "auto" else formats[-1]
