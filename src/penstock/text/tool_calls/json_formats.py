"""Tool call formats in which the arguments are a JSON object."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from .json_calls import NAME_AS_KEY, JSONFormat

HERMES = JSONFormat(
    parsers=("hermes", "qwen", "qwen25", "ernie", "ernie45", "granite4", "trinity"),
    template_markers=("<tool_call>",),
    excluded_markers=("<function=", "<arg_key>", "<tool_calls>", "]<]minimax[>["),  # other families with <tool_call>
    start_markers=("<tool_call>",),
    end_markers=("</tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>"),
    call_start=('<tool_call>\n{"name": ', ', "arguments": '),
    call_end="}\n</tool_call>",
    separator="\n",
)
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call: Hermes 2 and 3, Qwen 2.5 and 3, ERNIE 4.5,
Granite 4, Trinity."""

GENERIC = replace(HERMES, parsers=("generic",), template_markers=(), excluded_markers=())
"""The format of ``HERMES``, described in the system message (``generic_tools``): models whose chat template has no
tools. Not detected."""

LONGCAT = replace(
    HERMES,
    parsers=("longcat",),
    template_markers=("<longcat_tool_call>",),
    excluded_markers=("<longcat_arg_key>",),
    start_markers=("<longcat_tool_call>",),
    end_markers=("</longcat_tool_call>",),
    marker_tokens=("<longcat_tool_call>", "</longcat_tool_call>"),
    call_start=('<longcat_tool_call>\n{"name": ', ', "arguments": '),
    call_end="}\n</longcat_tool_call>",
)
"""``<longcat_tool_call>{"name": …, "arguments": {…}}</longcat_tool_call>`` for each call: LongCat-Flash-Chat."""

LLAMA3_JSON = JSONFormat(
    parsers=("llama3_json", "llama3", "llama4_json"),
    template_markers=('{"name": function name, "parameters": ',),
    start_markers=("<|python_tag|>", "<|python_start|>"),
    allow_unmarked=True,
    repeats=True,
    separators=(";",),
    end_markers=("<|python_end|>",),
    marker_tokens=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    call_start=('{"name": ', ', "parameters": '),
    call_end="}",
    separator="; ",
)
"""``{"name": …, "parameters": {…}}`` at the beginning of the answer or after ``<|python_tag|>``, separated by ``; ``:
Llama 3.1, 3.2 and 3.3; Llama 4, optionally between ``<|python_start|>`` and ``<|python_end|>``."""

MISTRAL = JSONFormat(
    parsers=("mistral",),
    template_markers=("[TOOL_CALLS]",),
    start_markers=("[TOOL_CALLS]",),
    lead=" \n\r\t[",
    name_pattern=re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(\[CALL_ID\][^\s\[\]{}]*\s*)?(\[ARGS\]\s*)?"),
    names=("f[CALL_ID]0[ARGS]",),
    end_markers=("]",),
    separators=(",",),
    marker_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    call_id=("", 9),
    prefix="[TOOL_CALLS] [",
    call_start=('{"name": ', ', "arguments": '),
    call_end="}",
    separator=", ",
    suffix="]",
)
"""``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``: Mistral up to tokenizer v7."""

MISTRAL_ARGS = replace(
    MISTRAL,
    template_markers=("[TOOL_CALLS]", "[ARGS]"),
    prefix="",
    call_start=("[TOOL_CALLS]", "[ARGS]"),
    call_end="",
    separator="",
    suffix="",
)
"""``[TOOL_CALLS]name[ARGS]{…}`` for each call: Mistral from tokenizer v11 on. Both parsers read both formats."""

DEEPSEEK_V3 = JSONFormat(
    parsers=("deepseek_v3", "deepseekv3"),
    template_markers=("<｜tool▁call▁begin｜>", "```json"),
    start_markers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    name_pattern=re.compile(
        r"\s*(<｜tool▁call▁begin｜>\s*)?"
        r"(function<｜tool▁sep｜>(?P<name>[^\n{]+)\n```json\s*|(?P<other>[^\n{]+?)<｜tool▁sep｜>\s*)"
    ),
    names=(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    ),
    end_markers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    marker_tokens=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    prefix="<｜tool▁calls▁begin｜>",
    call_start=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
    call_end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    suffix="<｜tool▁calls▁end｜>",
)
"""``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, the arguments as a block of JSON,
``<｜tool▁call▁end｜>`` … ``<｜tool▁calls▁end｜>``: DeepSeek V3 and R1."""

DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    parsers=("deepseek_v3", "deepseek_v31", "deepseekv31"),
    template_markers=("<｜tool▁call▁begin｜>",),
    call_start=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    call_end="<｜tool▁call▁end｜>",
    separator="",
)
"""Same as ``DEEPSEEK_V3``, but with only the name before ``<｜tool▁sep｜>`` and only the arguments after it: DeepSeek
V3.1. Both parsers read both formats."""

GRANITE = JSONFormat(
    parsers=("granite",),
    template_markers=("<|tool_call|>",),
    start_markers=("<|tool_call|>",),
    lead=" \n\r\t[",
    end_markers=("]",),
    separators=(",",),
    marker_tokens=("<|tool_call|>",),
    prefix="<|tool_call|>[",
    call_start=('{"name": ', ', "arguments": '),
    call_end="}",
    separator=", ",
    suffix="]",
)
"""``<|tool_call|>[{"name": …, "arguments": {…}}, …]``: Granite 3."""

PHI4 = replace(
    GRANITE,
    parsers=("phi4_mini_json",),
    template_markers=("<|tool|>",),
    start_markers=("functools[", "<|tool_call|>"),
    end_markers=("]", "<|/tool_call|>"),
    marker_tokens=("<|tool_call|>", "<|/tool_call|>"),
    prefix="functools[",
)
"""``functools[{"name": …, "arguments": {…}}, …]``: Phi-4-mini. The parser also reads calls between its call tokens."""

GRANITE_20B_FC = JSONFormat(
    parsers=("granite-20b-fc",),
    template_markers=("<function_call>", "<|function_call_library|>"),
    start_markers=("<function_call>",),
    marker_tokens=("<function_call>",),
    call_start=('<function_call> {"name": ', ', "arguments": '),
    call_end="}",
    separator="\n",
)
"""``<function_call> {"name": …, "arguments": {…}}`` for each call: Granite-20B-FunctionCalling."""

NEMOTRON = replace(
    GRANITE,
    parsers=("nemotron_json", "llama_nemotron_json"),
    template_markers=("<TOOLCALL>",),
    start_markers=("<TOOLCALL>",),
    end_markers=("]", "</TOOLCALL>"),
    marker_tokens=("<TOOLCALL>", "</TOOLCALL>"),
    prefix="<TOOLCALL>[",
    suffix="]</TOOLCALL>",
)
"""``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``: Nemotron Nano 2, Llama-Nemotron."""

XLAM = replace(
    GRANITE,
    parsers=("xlam",),
    template_markers=("make calls in a single JSON array",),
    start_markers=("[TOOL_CALLS]", "<tool_call>", "```json"),
    end_markers=("]", "</tool_call>", "```"),
    marker_tokens=("[TOOL_CALLS]", "<tool_call>", "</tool_call>"),
    constrainable=False,  # ```json also begins blocks that are no calls
    allow_unmarked=True,
    prefix="[",
)
"""``[{"name": …, "arguments": {…}}, …]`` at the beginning of the answer: xLAM 2. The parser also reads calls after
``[TOOL_CALLS]``, in ``<tool_call>`` and in a block of JSON."""

APERTUS = replace(
    GRANITE,
    parsers=("apertus", "apertus2509"),
    template_markers=("<|tools_prefix|>",),
    start_markers=("<|tools_prefix|>",),
    head=NAME_AS_KEY,
    end_markers=("]", "<|tools_suffix|>"),
    marker_tokens=("<|tools_prefix|>", "<|tools_suffix|>"),
    prefix="<|tools_prefix|>[",
    call_start=('{"', '": '),
    suffix="]<|tools_suffix|>",
)
"""``<|tools_prefix|>[{name: {…}}, …]<|tools_suffix|>``: Apertus."""

MINIMAX_M1 = replace(
    GRANITE,
    parsers=("minimax_m1", "minimax"),
    template_markers=("<tool_calls>", "<beginning_of_sentence>"),
    start_markers=("<tool_calls>",),
    end_markers=("]", "</tool_calls>"),
    marker_tokens=("<tool_calls>", "</tool_calls>"),
    repeats=True,
    prefix="<tool_calls>\n",
    separator="\n",
    suffix="\n</tool_calls>",
)
"""``<tool_calls>{"name": …, "arguments": {…}}</tool_calls>``, each call on a line: MiniMax-M1."""

MINIMAX_01 = JSONFormat(
    parsers=("minimax_01",),
    template_markers=("function_setting=functions",),
    start_markers=("<function_call>", "```typescript\nfunctions."),
    name_pattern=re.compile(r"\s*(```typescript\s*)?(functions\.)?(?P<name>[^\s(){}`]+)\(\s*"),
    names=("```typescript\nfunctions.f(",),
    end_markers=(")\n```",),
    marker_tokens=("<function_call>",),
    call_start=("<function_call>```typescript\nfunctions.", "("),
    call_end=")\n```",
    separator="\n",
)
"""``<function_call>```typescript functions.name({…})`` in a block of code for each call: MiniMax-01."""

HUNYUAN = replace(
    GRANITE,
    parsers=("hunyuan_a13b", "jamba"),
    template_markers=("<tool_calls>",),
    excluded_markers=("<tool_sep>",),  # a marker of Hunyuan 3
    start_markers=("<tool_calls>",),
    end_markers=("]", "</tool_calls>"),
    marker_tokens=("<tool_calls>", "</tool_calls>"),
    prefix="<tool_calls>[",
    suffix="]</tool_calls>",
)
"""``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``: Hunyuan, Jamba."""

COHERE = replace(
    GRANITE,
    parsers=("cohere_command3", "cohere_command4"),
    template_markers=("<|START_ACTION|>",),
    start_markers=("<|START_ACTION|>",),
    end_markers=("]", "<|END_ACTION|>"),
    marker_tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    prefix="<|START_ACTION|>[",
    call_start=('{"tool_call_id": "0", "tool_name": ', ', "parameters": '),
    suffix="]<|END_ACTION|>",
)
"""``<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>``: Command R7B, A and
A+."""

INTERNLM = JSONFormat(
    parsers=("internlm", "interns1"),
    template_markers=("<|action_start|>",),
    start_markers=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
    end_markers=("<|action_end|>",),
    marker_tokens=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    prefix="<|action_start|><|plugin|>",
    call_start=('{"name": ', ', "parameters": '),
    call_end="}<|action_end|>",
    separator="<|action_start|><|plugin|>",
)
"""``<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>`` for each call: InternLM 2 and 3."""

KIMI_K2 = JSONFormat(
    parsers=("kimi_k2",),
    template_markers=("<|tool_calls_section_begin|>",),
    start_markers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    name_pattern=re.compile(
        r"\s*(<\|tool_call_begin\|>\s*)?(?P<id>(functions\.)?(?P<name>[^\s{}<>|]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
    ),
    names=("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",),
    end_markers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    marker_tokens=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    prefix="<|tool_calls_section_begin|>",
    call_start=("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>"),
    call_end="<|tool_call_end|>",
    suffix="<|tool_calls_section_end|>",
)
"""``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`` for each call, in a section.
The text before the arguments is the call's id, which the template needs in later turns: Kimi-K2."""


class HarmonyFormat(JSONFormat):
    """Calls in messages to functions (``text.harmony``)."""

    @property
    def triggers(self) -> tuple[str, ...]:
        return ("to=functions.",)

    def heads(self) -> list[str]:
        return list(self.triggers)

    def before_arguments(self) -> dict[str, Any]:
        texts = [f"{channel}{kind}<|message|>" for channel in ("", "<|channel|>commentary") for kind in self.kinds]
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}

    kinds: ClassVar = (" <|constrain|>json", " json", "")
    """Texts with the type of the arguments."""


GIGACHAT3 = JSONFormat(
    parsers=("gigachat3",),
    template_markers=("<|role_sep|>", "function call"),
    excluded_markers=("<|function_call|>", "GCML"),
    start_markers=("<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>", "<|function_call|>"),
    end_markers=("<|message_sep|>",),
    marker_tokens=("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
    prefix="<|message_sep|>\n\n",
    call_start=('function call<|role_sep|>\n{"name": ', ', "arguments": '),
    call_end="}",
    separator="<|message_sep|>\n\n",
)
"""``function call<|role_sep|>{"name": …, "arguments": {…}}``, which is a message after the answer: GigaChat 3."""

GIGACHAT31 = replace(
    GIGACHAT3,
    template_markers=("<|role_sep|>", "<|function_call|>"),
    excluded_markers=(),
    prefix="",
    call_start=('<|function_call|>{"name": ', ', "arguments": '),
    separator="",
)
"""``<|function_call|>{"name": …, "arguments": {…}}``: GigaChat 3.1. The parser reads both formats."""

SOLAR_OPEN = JSONFormat(
    parsers=("solar_open",),
    template_markers=("<|tool_call:args|>",),
    start_markers=("<|tool_calls|>", "<|tool_call:begin|>"),
    name_pattern=re.compile(
        r"\s*(<\|tool_call:begin\|>)?\s*(?P<id>[^\s{}<>|]{0,64})\s*"
        r"<\|tool_call:name\|>\s*(?P<name>[^\s{}<>|]+)\s*<\|tool_call:args\|>\s*"
    ),
    names=("<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>",),
    end_markers=("<|tool_call:end|>", "<|calls|>"),
    marker_tokens=(
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|calls|>",
    ),
    call_id=("", 10),
    prefix="<|tool_calls|>",
    call_start=("<|tool_call:begin|><|tool_call:name|>", "<|tool_call:args|>"),
    call_end="<|tool_call:end|>",
)
"""``<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>`` for each call: Solar Open."""

INKLING = JSONFormat(
    parsers=("inkling",),
    template_markers=("<|content_invoke_tool_json|>",),
    start_markers=("<|message_model|>", "<|content_invoke_tool_json|>"),
    header_end="<|content_invoke_tool_json|>",
    end_markers=("<|end_message|>", "<|content_model_end_sampling|>"),
    marker_tokens=(
        "<|message_model|>",
        "<|content_invoke_tool_json|>",
        "<|end_message|>",
        "<|content_model_end_sampling|>",
    ),
    allow_unmarked=True,
    call_start=('<|content_invoke_tool_json|>{"name": ', ', "args": '),
    call_end="}<|end_message|>",
    separator="<|message_model|>",
)
"""``<|message_model|>name<|content_invoke_tool_json|>{"name": …, "args": {…}}<|end_message|>`` for each call:
Inkling."""

HARMONY = HarmonyFormat(
    parsers=("openai", "gpt-oss"),
    template_markers=("<|channel|>", "<|call|>"),
    start_markers=("<|channel|>commentary to=functions.",),
    end_markers=("<|call|>",),
    marker_tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    call_start=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
    separator="<|end|><|start|>assistant",
    answer_start="<|channel|>final<|message|>",
    single=True,
)
"""``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``: gpt-oss. ``text.harmony`` parses
the answers."""

FORMATS = (
    HARMONY,
    XLAM,
    HERMES,
    LONGCAT,
    MISTRAL_ARGS,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    LLAMA3_JSON,
    GRANITE,
    GRANITE_20B_FC,
    PHI4,
    NEMOTRON,
    APERTUS,
    MINIMAX_M1,
    MINIMAX_01,
    HUNYUAN,
    COHERE,
    INTERNLM,
    KIMI_K2,
    SOLAR_OPEN,
    GIGACHAT3,
    GIGACHAT31,
    INKLING,
    GENERIC,
)
