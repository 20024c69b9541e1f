"""Tool call formats in which the arguments are a JSON object."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from .json_calls import JSONFormat

HERMES = JSONFormat(
    parsers=("hermes", "qwen", "ernie", "granite4"),
    template_markers=("<tool_call>",),
    excluded_markers=("<function=", "<arg_key>"),  # markers of Qwen3-Coder and GLM, which also have <tool_call>
    start_markers=("<tool_call>",),
    end_markers=("</tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>"),
    call_start=('<tool_call>\n{"name": ', ', "arguments": '),
    call_end="}\n</tool_call>",
    separator="\n",
)
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call: Hermes 2 and 3, Qwen 2.5 and 3, ERNIE 4.5,
Granite 4."""

LLAMA3_JSON = JSONFormat(
    parsers=("llama3_json", "llama4_json"),
    template_markers=('{"name": function name, "parameters": ',),
    start_markers=("<|python_tag|>", "<|python_start|>"),
    allow_unmarked=True,
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
    parsers=("deepseek_v3",),
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
    parsers=("deepseek_v3", "deepseek_v31"),
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

HUNYUAN = replace(
    GRANITE,
    parsers=("hunyuan_a13b", "jamba"),
    template_markers=("<tool_calls>",),
    start_markers=("<tool_calls>",),
    end_markers=("]", "</tool_calls>"),
    marker_tokens=("<tool_calls>", "</tool_calls>"),
    prefix="<tool_calls>[",
    suffix="]</tool_calls>",
)
"""``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``: Hunyuan, Jamba."""

COHERE = replace(
    GRANITE,
    parsers=("cohere_command3",),
    template_markers=("<|START_ACTION|>",),
    start_markers=("<|START_ACTION|>",),
    end_markers=("]", "<|END_ACTION|>"),
    marker_tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    prefix="<|START_ACTION|>[",
    call_start=('{"tool_call_id": "0", "tool_name": ', ', "parameters": '),
    suffix="]<|END_ACTION|>",
)
"""``<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>``: Command R7B and A."""

INTERNLM = JSONFormat(
    parsers=("internlm",),
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


HARMONY = HarmonyFormat(
    parsers=("openai",),
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
    HERMES,
    MISTRAL_ARGS,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    LLAMA3_JSON,
    GRANITE,
    PHI4,
    HUNYUAN,
    COHERE,
    INTERNLM,
    KIMI_K2,
)
