"""The forms in which models write calls of tools, as data: a form's name is that of vLLM's parser for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from uuid import uuid4


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """How a kind of model writes calls.

    In all of them a call begins with a mark, and its arguments are a JSON object. The name stands before that, be it
    within an object of both (``{"name": …, "arguments": {…}}``) or by itself.
    """

    parsers: tuple[str, ...]
    """Names of ``--tool-call-parser``."""
    signs: tuple[str, ...]
    """All of them are in the chat templates of such models."""
    unlike: tuple[str, ...] = ()
    """None of these is."""
    marks: tuple[str, ...]
    """Each begins a call."""
    bare: bool = False
    """Whether a call may also begin an answer without a mark."""
    lead: str = " \n\r\t"
    """Characters that may stand between a mark and an object of name and arguments."""
    named: re.Pattern[str] | None = None
    """What stands between a mark and the arguments, where the name is told there."""
    closers: tuple[str, ...] = ()
    """Whatever may follow a call, and is part of it."""
    separators: tuple[str, ...] = ()
    """After a call, what another one without a mark may begin with."""
    tokens: tuple[str, ...]
    """Marks and all else that may be tokens of their own, and special ones."""

    call_id: tuple[str, int] = ("call_", 24)
    """What the id of a call begins with, and how many characters follow. Some templates take no others back."""
    before: str = ""
    """What is written before the first call."""
    begin: tuple[str, str]
    """Before and after its name."""
    end: str = ""
    """After its arguments."""
    between: str = ""
    """Between two calls."""
    after: str = ""
    """After the last call."""

    def is_in(self, template: str) -> bool:
        """Whether a chat template has this form."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.unlike)

    def new_id(self) -> str:
        """For a call."""
        prefix, length = self.call_id
        return prefix + uuid4().hex[:length]

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends arguments, however many braces are open: marks, and no part of any JSON."""
        return tuple(text for text in (*self.marks, *self.closers, *self.separators) if text not in ("]", ","))


HERMES = ToolCallFormat(
    parsers=("hermes", "qwen", "ernie"),
    signs=("<tool_call>",),
    unlike=("<function=", "<arg_key>"),  # which are in other forms with this mark
    marks=("<tool_call>",),
    closers=("</tool_call>",),
    tokens=("<tool_call>", "</tool_call>"),
    begin=('<tool_call>\n{"name": ', ', "arguments": '),
    end="}\n</tool_call>",
    between="\n",
)
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call: Hermes 2 and 3, Qwen 2.5 and 3, ERNIE 4.5."""

LLAMA3_JSON = ToolCallFormat(
    parsers=("llama3_json",),
    signs=('{"name": function name, "parameters": ',),
    marks=("<|python_tag|>",),
    bare=True,
    separators=(";",),
    tokens=("<|python_tag|>",),
    begin=('{"name": ', ', "parameters": '),
    end="}",
    between="; ",
)
"""``{"name": …, "parameters": {…}}`` at the beginning of the answer or after ``<|python_tag|>``, several with ``; ``
between them: Llama 3.1, 3.2 and 3.3."""

MISTRAL = ToolCallFormat(
    parsers=("mistral",),
    signs=("[TOOL_CALLS]",),
    marks=("[TOOL_CALLS]",),
    lead=" \n\r\t[",
    named=re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(\[CALL_ID\][^\s\[\]{}]*\s*)?(\[ARGS\]\s*)?"),
    closers=("]",),
    separators=(",",),
    tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    call_id=("", 9),
    before="[TOOL_CALLS] [",
    begin=('{"name": ', ', "arguments": '),
    end="}",
    between=", ",
    after="]",
)
"""``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``: Mistral up to the tokenizer v7."""

MISTRAL_ARGS = replace(
    MISTRAL,
    signs=("[TOOL_CALLS]", "[ARGS]"),
    before="",
    begin=("[TOOL_CALLS]", "[ARGS]"),
    end="",
    between="",
    after="",
)
"""``[TOOL_CALLS]name[ARGS]{…}`` for each call: Mistral from the tokenizer v11 on. Both are read by either."""

DEEPSEEK_V3 = ToolCallFormat(
    parsers=("deepseek_v3",),
    signs=("<｜tool▁call▁begin｜>", "```json"),
    marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    named=re.compile(
        r"\s*(<｜tool▁call▁begin｜>\s*)?"
        r"(function<｜tool▁sep｜>(?P<name>[^\n{]+)\n```json\s*|(?P<other>[^\n{]+?)<｜tool▁sep｜>\s*)"
    ),
    closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    tokens=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    before="<｜tool▁calls▁begin｜>",
    begin=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
    end="\n```<｜tool▁call▁end｜>",
    between="\n",
    after="<｜tool▁calls▁end｜>",
)
"""``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, the arguments as a block of JSON,
``<｜tool▁call▁end｜>`` … ``<｜tool▁calls▁end｜>``: DeepSeek V3 and R1."""

DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    signs=("<｜tool▁call▁begin｜>",),
    begin=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    end="<｜tool▁call▁end｜>",
    between="",
)
"""The same with the name alone before ``<｜tool▁sep｜>`` and the arguments alone after it: DeepSeek V3.1. Both are read
by either."""

FORMS = (HERMES, MISTRAL_ARGS, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, LLAMA3_JSON)


def tool_call_format(parser: str, template: str) -> ToolCallFormat | None:
    """The form that a parser of that name reads, or ``auto``: the one that the chat template has, if it has any."""
    own = [form for form in FORMS if parser in ("auto", *form.parsers)]
    found = next((form for form in own if form.is_in(template)), None)
    return found if found or parser == "auto" else own[-1]
