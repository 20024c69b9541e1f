"""Chat rendering: chat template, tokenization, images and videos, and the parser of the answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from penstock.config.options import ModelOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput
from penstock.text import (
    ChatTemplate,
    ParserConfig,
    ReasoningFormat,
    ReasoningStage,
    Tokenizer,
    ToolCallFormat,
    continued_text,
    initial_stage,
    reasoning_format,
    tool_call_format,
)
from penstock.text.control_tokens import remove_breaks, restore_breaks, with_message_breaks
from penstock.text.encoding import Texts
from penstock.text.generic_tools import NO_TOOLS, generic_messages, tool_instructions
from penstock.text.isolated_template import IsolatedTemplate, TemplatePool
from penstock.text.side_files import choose_template

from .multimodal import IMAGE, move_tool_media, split_media
from .multimodal.prompt_media import PromptMedia
from .prompts import Messages, TokenizedPrompt

logger = logging.getLogger(__name__)

MAX_TEMPLATES = 16
"""Maximum number of chat templates for which markers are remembered."""
GENERIC = "generic"
"""Value of ``--tool-call-parser`` with which tools are described in the system message."""
T = TypeVar("T")
Template = ChatTemplate | IsolatedTemplate


class ResponseFormats(NamedTuple):
    """Formats of a model's tool calls and reasoning; None: the chat template does not use them, or the format is
    unknown."""

    tools: ToolCallFormat | None
    reasoning: ReasoningFormat | None


@lru_cache(16)
def _response_formats(options: ModelOptions, template: str) -> ResponseFormats:
    uses_tools = re.search(r"\btools\b", template) is not None  # a template without tools hides them from the model
    uses_tools |= options.tool_call_parser == GENERIC
    tools = tool_call_format(options.tool_call_parser, template) if uses_tools else None
    return ResponseFormats(tools, reasoning_format(options.reasoning_parser, template))


class Steps:
    """Runs the slow steps of rendering in the caller's thread. ``Gateway`` overrides them to use other threads and
    processes."""

    async def render(
        self, template: Template, messages: Messages, options: Mapping[str, Any], size: int, client: str
    ) -> str:
        """Render a chat; ``size`` and ``client`` as for ``ChatRenderer.prompt``."""
        return template.render(messages, **options)

    async def load(self, work: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions that load media; returns their results."""
        return [each() for each in work]

    async def prepare(self, size: int, work: Callable[[], T]) -> T:
        """Call a function that processes ``size`` characters; returns its result."""
        return work()

    def check_length(self, text: str) -> None:
        """Raise an error for a text that cannot fit the context, before it is encoded."""


def run_inline(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses ``Steps`` without an event loop. It must never suspend."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError(f"the coroutine {coroutine!r} has suspended, but runs without an event loop")


class ChatRenderer:
    """Renders a model's chats.

    Args:
        options: template and parser options.
    """

    def __init__(self, tokenizer: Tokenizer, media: PromptMedia, options: ModelOptions) -> None:
        self._tokenizer = tokenizer
        self._media = media
        self._options = options
        self._own_formats: dict[bool, ResponseFormats] = {}
        """Formats of the model's chat templates; key: True for chats with tools."""
        self._markers: dict[str, frozenset[str]] = {}
        """Control tokens that stay tokens in the assistant's messages, by chat template."""
        self._request_templates = TemplatePool()
        """Processes that render chat templates sent with requests; the model's template is rendered elsewhere."""

    def close(self) -> None:
        self._request_templates.close()

    async def prompt(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        steps: Steps,
        *,
        size: int = 0,
        allow_tool_calls: bool = False,
        template: str | None = None,
        add_special_tokens: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        client: str = "",
    ) -> TokenizedPrompt:
        """Render and encode a chat, and load its images and videos.

        Args:
            messages: each ``content`` is a text, or a list of parts (see ``multimodal.split_media``).
            options: keyword arguments of ``ChatTemplate.render``.
            size: approximate number of characters of the chat.
            allow_tool_calls: parse tool calls in the answer.
            template: chat template to use instead of the model's.
            add_special_tokens: add the tokenizer's special tokens (BOS, EOS), also if the template writes some.
            client: sender of the request; rendering is scheduled round robin over clients.

        Raises ``PenstockError`` if the chat is invalid, or has media that the model does not support.
        """
        messages, sources = split_media(messages)
        if sources:
            self._media.check(sources)

        async def encoded(messages: Messages) -> tuple[Texts, list[int]]:
            """Text and token ids of the chat, with one placeholder per image and video."""
            rendered = await self.text(messages, options, steps, size, template, client)
            steps.check_length(rendered.text)
            encode = partial(self._tokenizer.encode, rendered.text, add_special_tokens, rendered.has_breaks)
            token_ids = await steps.prepare(len(rendered.text), encode)
            if sources:
                self._media.check_placeholders(token_ids, sources)
            return rendered, token_ids

        try:
            rendered, token_ids = await encoded(messages)
        except PenstockError:  # the template may not support images in tool results
            if (moved := move_tool_media(messages)) is None:
                raise
            rendered, token_ids = await encoded(moved)
        parser_config = self.parser_config(rendered.text, messages, options, allow_tool_calls, template)
        images: tuple[ImageInput, ...] = ()
        if sources:
            num_images = sum(source.kind == IMAGE for source in sources)
            media = await steps.load(
                [partial(self._media.load, source, mm_processor_kwargs, num_images) for source in sources]
            )
            place = partial(self._media.place, token_ids, rendered.text, media, add_special_tokens, rendered.has_breaks)
            token_ids, images = await steps.prepare(max(size, len(rendered.text)), place)
        text = remove_breaks(rendered.text) if rendered.has_breaks else rendered.text
        return TokenizedPrompt(token_ids, text, images, parser_config=parser_config)

    async def text(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        steps: Steps,
        size: int = 0,
        template: str | None = None,
        client: str = "",
    ) -> Texts:
        """Render a chat to text; arguments as for ``prompt``. The text has breaks if the content of the messages has
        control tokens, unless the option ``allow_special_tokens_in_content`` is set.

        Raises ``PenstockError``: ``invalid`` for wrong options or messages, ``unsupported`` for tools if the model's
        template does not support them.
        """
        if wrong := options.keys() & {"messages", "self"}:
            raise invalid("chat_template_kwargs", f"{wrong.pop()!r} is a reserved name: remove it")
        chosen: Template
        generic = self._options.tool_call_parser == GENERIC
        if template is None:
            chosen = self._tokenizer.template_for(tools=not generic and options.get("tools") is not None)
            if not generic and options.get("tools") and "tools" not in chosen.variables:
                raise PenstockError(Code.UNSUPPORTED, NO_TOOLS, "tools")
        else:
            chosen = IsolatedTemplate(template, self._tokenizer.special, self._request_templates, "chat_template")
        if self._options.allow_special_tokens_in_content:
            return Texts(await self._rendered(chosen, messages, options, size, client, steps))
        tokens = self._tokenizer.control_tokens
        find = partial(with_message_breaks, messages, options, tokens, self._assistant_tokens(chosen.source))
        if broken := await steps.prepare(size, find):
            try:
                text = await self._rendered(chosen, *broken, size, client, steps)
                return Texts(restore_breaks(text), has_breaks=True)
            except PenstockError as error:
                if error.failure.limit is not None:  # the template takes too long
                    raise
                failure = error.failure
        text = await self._rendered(chosen, messages, options, size, client, steps)
        if broken:
            message = "the chat template rejects messages with protected control tokens (%s): they stay control tokens"
            logger.warning(message, failure.message)
        return Texts(text)

    async def _rendered(
        self,
        chosen: Template,
        messages: Messages,
        options: Mapping[str, Any],
        size: int,
        client: str,
        steps: Steps,
    ) -> str:
        """Render the messages. Parameters as for ``text``; with ``GENERIC``, tools are described in a message."""
        if self._options.tool_call_parser != GENERIC:
            return await steps.render(chosen, messages, options, size, client)
        instructions = tool_instructions(options["tools"]) if options.get("tools") else ""
        options = {name: value for name, value in options.items() if name != "tools"}
        converted = generic_messages(messages, instructions)
        try:
            text = await steps.render(chosen, converted, options, size, client)
            if not instructions or remove_breaks(instructions) in remove_breaks(text):
                return text
        except PenstockError as error:
            if not instructions or error.failure.code is not Code.INVALID:
                raise
        # the template has no system message
        converted = generic_messages(messages, instructions, in_system=False)
        return await steps.render(chosen, converted, options, size, client)

    def _assistant_tokens(self, template: str) -> Collection[str]:
        """Control tokens that stay tokens in the assistant's messages: the markers of reasoning and tool calls, which
        chat templates search for."""
        if (found := self._markers.get(template)) is None:
            text = _all_markers(reasoning_format("auto", template), tool_call_format("auto", template))
            found = frozenset(token for token in self._tokenizer.control_tokens.breaks if token in text)
            self._markers = (
                {**self._markers, template: found} if len(self._markers) < MAX_TEMPLATES else {template: found}
            )
        return found

    def response_formats(self, template: str | None = None, tools: bool = True) -> ResponseFormats:
        """Formats of tool calls and reasoning with a chat template.

        Args:
            template: chat template; None: the model's template.
            tools: choose the model's template for chats with tools.
        """
        if template is not None:
            return _response_formats(self._options, template)
        tools = tools and self._options.tool_call_parser != GENERIC
        if tools not in self._own_formats:
            source = choose_template(self._tokenizer.templates, tools) or ""
            self._own_formats[tools] = _response_formats(self._options, source)
        return self._own_formats[tools]

    def parser_config(
        self,
        prompt: str,
        messages: Messages,
        options: Mapping[str, Any],
        allow_tool_calls: bool,
        template: str | None = None,
    ) -> ParserConfig:
        """Parser configuration for the answer to a chat.

        Args:
            prompt: the rendered prompt, or its end.
            messages, options: inputs of the rendering; ``options["tools"]`` gives the types of tool arguments.
            allow_tool_calls: parse tool calls; without ``options["tools"]`` only those that begin with a marker.
            template: chat template of ``prompt``; None: the model's template.
        """
        tools, reasoning = self.response_formats(template, options.get("tools") is not None)
        stage, continued = ReasoningStage.AFTER, bool(options.get("continue_final_message"))
        if reasoning:
            stage = initial_stage(reasoning, prompt, (continued_text(messages[-1]) or "") if continued else "")
        if not allow_tool_calls:
            return ParserConfig(reasoning, stage, continued)
        if tools and tools.allow_unmarked and not options.get("tools"):  # without tools, unmarked JSON is content
            tools = replace(tools, allow_unmarked=False)
        return ParserConfig(reasoning, stage, continued, tools, _schemas(options.get("tools")))


def _schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Parameter schemas by tool name, for tools in OpenAI's format."""
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    schemas = {
        function["name"]: function.get("parameters")
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
    return {name: schema for name, schema in schemas.items() if isinstance(schema, Mapping)}


def _all_markers(reasoning: ReasoningFormat | None, tools: ToolCallFormat | None) -> str:
    """All markers of an answer's formats, one per line."""
    found: list[str] = []
    if reasoning:
        found += [reasoning.start_marker, reasoning.end_marker, *reasoning.answer_markers, reasoning.begin]
        found += [reasoning.before_answer, reasoning.before_call]
    if tools:
        found += [*tools.start_markers, *tools.end_markers, *tools.marker_tokens, tools.prefix, *tools.call_start]
        found += [tools.call_end, tools.separator, tools.suffix]
    return "\n".join(found)
