"""The formats in which models write tool calls, as data. Parsers have the names of vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from uuid import uuid4


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """How a family of models writes tool calls.

    A call begins with a start marker, and its arguments are a JSON object. The name comes before the arguments, either
    in one object with them (``{"name": …, "arguments": {…}}``) or by itself.
    """

    parsers: tuple[str, ...]
    """Names of ``--tool-call-parser``."""
    template_markers: tuple[str, ...]
    """Texts by which the family's chat templates are recognized; all of them must be present."""
    excluded_markers: tuple[str, ...] = ()
    """Texts that must not be present."""
    start_markers: tuple[str, ...]
    """Each of them begins a call."""
    allow_unmarked: bool = False
    """Whether a call at the beginning of an answer needs no start marker."""
    lead: str = " \n\r\t"
    """Characters allowed between a start marker and the object of name and arguments."""
    name_pattern: re.Pattern[str] | None = None
    """The text between a start marker and the arguments, where the name is there; its groups hold the name."""
    end_markers: tuple[str, ...] = ()
    """Texts that may follow a call and belong to it."""
    separators: tuple[str, ...] = ()
    """Texts after a call that begin another one without a start marker."""
    marker_tokens: tuple[str, ...]
    """Texts of this format that may be special tokens; they are detokenized nevertheless."""

    # How a forced call is written:
    call_id: tuple[str, int] = ("call_", 24)
    """Prefix of a call's id, and number of characters after it; some templates accept no others."""
    prefix: str = ""
    """Text before the first call."""
    call_start: tuple[str, str]
    """Text before and after a call's name."""
    call_end: str = ""
    """Text after a call's arguments."""
    separator: str = ""
    """Text between two calls."""
    suffix: str = ""
    """Text after the last call."""

    def matches(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        present = all(text in template for text in self.template_markers)
        return present and not any(text in template for text in self.excluded_markers)

    def new_id(self) -> str:
        """A new id for a call."""
        prefix, length = self.call_id
        return prefix + uuid4().hex[:length]

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the arguments even where braces are open: the markers that cannot be part of JSON."""
        return tuple(
            text for text in (*self.start_markers, *self.end_markers, *self.separators) if text not in ("]", ",")
        )


HERMES = ToolCallFormat(
    parsers=("hermes", "qwen", "ernie"),
    template_markers=("<tool_call>",),
    excluded_markers=("<function=", "<arg_key>"),  # which are in other forms with this mark
    start_markers=("<tool_call>",),
    end_markers=("</tool_call>",),
    marker_tokens=("<tool_call>", "</tool_call>"),
    call_start=('<tool_call>\n{"name": ', ', "arguments": '),
    call_end="}\n</tool_call>",
    separator="\n",
)
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call: Hermes 2 and 3, Qwen 2.5 and 3, ERNIE 4.5."""

LLAMA3_JSON = ToolCallFormat(
    parsers=("llama3_json",),
    template_markers=('{"name": function name, "parameters": ',),
    start_markers=("<|python_tag|>",),
    allow_unmarked=True,
    separators=(";",),
    marker_tokens=("<|python_tag|>",),
    call_start=('{"name": ', ', "parameters": '),
    call_end="}",
    separator="; ",
)
"""``{"name": …, "parameters": {…}}`` at the beginning of the answer or after ``<|python_tag|>``, several with ``; ``
between them: Llama 3.1, 3.2 and 3.3."""

MISTRAL = ToolCallFormat(
    parsers=("mistral",),
    template_markers=("[TOOL_CALLS]",),
    start_markers=("[TOOL_CALLS]",),
    lead=" \n\r\t[",
    name_pattern=re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(\[CALL_ID\][^\s\[\]{}]*\s*)?(\[ARGS\]\s*)?"),
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
"""``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``: Mistral up to the tokenizer v7."""

MISTRAL_ARGS = replace(
    MISTRAL,
    template_markers=("[TOOL_CALLS]", "[ARGS]"),
    prefix="",
    call_start=("[TOOL_CALLS]", "[ARGS]"),
    call_end="",
    separator="",
    suffix="",
)
"""``[TOOL_CALLS]name[ARGS]{…}`` for each call: Mistral from the tokenizer v11 on. Both are read by either."""

DEEPSEEK_V3 = ToolCallFormat(
    parsers=("deepseek_v3",),
    template_markers=("<｜tool▁call▁begin｜>", "```json"),
    start_markers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    name_pattern=re.compile(
        r"\s*(<｜tool▁call▁begin｜>\s*)?"
        r"(function<｜tool▁sep｜>(?P<name>[^\n{]+)\n```json\s*|(?P<other>[^\n{]+?)<｜tool▁sep｜>\s*)"
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
    template_markers=("<｜tool▁call▁begin｜>",),
    call_start=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    call_end="<｜tool▁call▁end｜>",
    separator="",
)
"""The same with the name alone before ``<｜tool▁sep｜>`` and the arguments alone after it: DeepSeek V3.1. Both are read
by either."""

GRANITE = ToolCallFormat(
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
    start_markers=("functools", "<|tool_call|>"),
    end_markers=("]", "<|/tool_call|>"),
    marker_tokens=("<|tool_call|>", "<|/tool_call|>"),
    prefix="functools[",
)
"""``functools[{"name": …, "arguments": {…}}, …]``: Phi-4-mini; also between its tokens for calls."""

HUNYUAN = replace(
    GRANITE,
    parsers=("hunyuan_a13b",),
    template_markers=("<tool_calls>",),
    start_markers=("<tool_calls>",),
    end_markers=("]", "</tool_calls>"),
    marker_tokens=("<tool_calls>", "</tool_calls>"),
    prefix="<tool_calls>[",
    suffix="]</tool_calls>",
)
"""``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``: Hunyuan."""

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

INTERNLM = ToolCallFormat(
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

TOOL_CALL_FORMATS = (
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
)


def tool_call_format(parser: str, template: str) -> ToolCallFormat | None:
    """The format of a parser by name; ``auto`` is the one that the chat template uses, None where it uses none."""
    formats = [form for form in TOOL_CALL_FORMATS if parser in ("auto", *form.parsers)]
    result = next((form for form in formats if form.matches(template)), None)
    return result if result or parser == "auto" else formats[-1]
