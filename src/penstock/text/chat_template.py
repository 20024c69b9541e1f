"""Chat templates: sandboxed Jinja with the extensions and functions of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn
from uuid import uuid4

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid


class Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training. The content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's base class declares a mutable set

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object for templates that use ``tojson``, JSON text for those that print it."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, after: str) -> str:
        return f"{self}{after}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


class TemplateRefusal(Exception):
    """Raised by a template's ``raise_exception``."""


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja filter ``tojson`` without the HTML escapes of Jinja's built-in filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
)
_environment.filters["tojson"] = _tojson
_environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}


def template_variables(source: str) -> frozenset[str]:
    """Names of the variables that a template reads. Parses only: compiling would evaluate constant expressions."""
    names = _environment.parse(source).find_all(Name)
    return frozenset(name.name for name in names if name.ctx == "load")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: text of the template.
        special: special tokens by role (``bos_token``, ...), available as variables.

    Raises ``PenstockError`` (``invalid``) for a template that does not compile.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        try:
            self._template = _environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise invalid("chat_template", f"syntax error in line {error.lineno}: {error.message}") from error
        self.source = source
        """Text of the template."""
        self.variables = template_variables(source)
        """Names of the variables that the template reads."""
        self._special = dict(special or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a chat to the model's prompt.

        Args:
            add_generation_prompt: end with the start of the assistant's turn.
            continue_final_message: end with the text of the last message, which the model continues.
            variables: further variables of the template (``enable_thinking``, ...).

        Raises ``PenstockError`` (``invalid``), with the template's message if it calls ``raise_exception``.
        """
        if continue_final_message and (not messages or continued_text(messages[-1]) is None):
            raise invalid("continue_final_message", "requires a last message with text content")
        if add_generation_prompt and continue_final_message:
            message = "cannot be combined with add_generation_prompt: set add_generation_prompt to false"
            raise invalid("continue_final_message", message)
        end = f"{uuid4().hex} "  # the space shows whether the template trims the content, as in transformers
        if continue_final_message:
            messages = [*messages[:-1], _with_end(messages[-1], end)]
        try:
            text = self._template.render(
                self._special | variables,
                messages=[_with_arguments(message) for message in messages],
                tools=tools,
                documents=variables.get("documents"),
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateRefusal as refusal:
            raise PenstockError(Code.INVALID, str(refusal), "messages") from refusal
        except Exception as error:  # a template can raise any exception for messages that it does not expect
            raise invalid("messages", f"the chat template cannot render these messages: {error}") from error
        if not continue_final_message:
            return text
        kept, separator, _ = text.rpartition(end)
        if not separator:
            kept, separator, _ = text.rpartition(end.strip())
            kept = kept.rstrip()
        if not separator:
            message = "is not possible: the chat template changes or drops the text of the last message"
            raise invalid("continue_final_message", message)
        return kept


def continued_text(message: Mapping[str, Any]) -> str | None:
    """The text that ``continue_final_message`` continues: the content, or its last text part."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content or () if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return texts[-1] if texts else None


def _with_end(message: Mapping[str, Any], end: str) -> Mapping[str, Any]:
    """Append ``end`` to the text that is continued."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + end}
    parts = list(content)
    at = max(i for i, part in enumerate(parts) if isinstance(part.get("text"), str))
    parts[at] = {**parts[at], "text": parts[at]["text"] + end}
    return {**message, "content": parts}


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls:
        function = call.get("function")
        if function and isinstance(function.get("arguments"), dict):
            call["function"] = {**function, "arguments": Arguments(function["arguments"])}
    return {**message, "tool_calls": calls}
