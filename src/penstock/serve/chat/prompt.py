"""The prompt of a chat, rendered from messages or given as token ids, and truncation of prompts."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.frontend.multimodal.kwargs import merge_media_kwargs
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.unknown_fields import UnknownFields
from penstock.serve.models.served_models import ServedModel

from .messages import messages_of, template_options
from .request import ChatRequest, PromptRequest

TEMPLATE_FIELDS = (
    "chat_template chat_template_kwargs documents reasoning_effort add_generation_prompt continue_final_message"
).split()
"""Fields of the chat template, which cannot be combined with ``prompt_token_ids``."""
TOKEN_BYTES = 36
"""Memory of a token id in a list, in bytes."""
NUM_TAIL_TOKENS = 32
"""Number of final tokens of a given prompt that are decoded to determine the reasoning stage."""


class ChatPrompt:
    """The prompt of one chat.

    Args:
        size: approximate number of characters of the request.
        record: collects fields that the model's template does not read.

    Raises ``PenstockError``: ``invalid`` for invalid values and combinations, ``unsupported`` for features that this
    model or server does not support.
    """

    def __init__(self, service: ServedModel, request: ChatRequest, size: int, record: RequestRecord) -> None:
        self._client = record.sender
        self._gateway = service.gateway
        self._gateway.input_processor.check_chats()
        self._request = request
        self._size = size
        if request.prompt_token_ids is not None:
            fields = ["messages"] if request.messages else TEMPLATE_FIELDS
            if given := [name for name in fields if getattr(request, name) is not None]:
                raise invalid(given[0], "cannot be combined with prompt_token_ids: remove one of them")
        elif not request.messages:
            raise invalid("messages", "must have at least one message, unless prompt_token_ids is given")
        input_processor = self._gateway.input_processor
        templates = input_processor.tokenizer.templates
        self._template = templates.get(request.chat_template or "", request.chat_template)
        """The request's chat template; None: the model's default."""
        if self._template not in (None, *templates.values()) and not service.options.trust_request_chat_template:
            message = "chat_template: this server does not accept templates in requests (trust_request_chat_template)"
            raise PenstockError(Code.UNSUPPORTED, message, "chat_template")
        self.formats = input_processor.chats.response_formats(self._template)
        """Formats of tool calls and reasoning of the chat template."""
        self.tools = self.formats.tools
        """Tool call format of the chat template; None if the template has no tools or an unknown format."""
        self._calls = bool(request.tools)
        tools = request.tools if request.tool_choice != "none" else None
        self._messages = messages_of(request.messages, service.sees_images)
        if request.messages:
            self._gateway.check_characters(sum(map(_num_characters, self._messages)))
        self._options = template_options(request, tools, self.tools is not None) | self._template_variables(
            request, record.unknown
        )
        self.echoed = ""
        """Text of the last message, which the answer repeats (``echo``). ``prompt`` removes trailing space if the
        template does."""
        last = self._messages[-1] if self._messages else {}
        if request.echo and (last.get("role") == "assistant" or not self._options["add_generation_prompt"]):
            self.echoed = last.get("content", "")
        self._has_images = any(isinstance(message["content"], list) for message in self._messages)
        if self._has_images:
            self._check_images()
        elif not service.sees_images:
            for name in ("mm_processor_kwargs", "media_io_kwargs"):
                if getattr(request, name):
                    message = f"{name}: this model does not support images"
                    raise PenstockError(Code.UNSUPPORTED, message, name)

    async def count_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len((await self.prompt()).token_ids)

    async def prompt(self) -> TokenizedPrompt:
        """Render and encode the prompt. Call it only once: it releases the messages."""
        request, gateway = self._request, self._gateway
        parser_config = gateway.input_processor.chats.parser_config
        if request.disable_chat_template and request.prompt_token_ids is None:
            text = self._messages[0]["content"]
            token_ids = await gateway.encode(text, size=self._size)
            config = parser_config(text, [], {}, allow_tool_calls=False)
            prompt = TokenizedPrompt(token_ids, text, parser_config=config)
        elif request.prompt_token_ids is None:
            messages, self._messages = self._messages, []
            kwargs = None
            if request.mm_processor_kwargs or request.media_io_kwargs:
                kwargs = merge_media_kwargs(request.mm_processor_kwargs or {}, request.media_io_kwargs or {})
            prompt = await gateway.chat_prompt(
                messages,
                self._size,
                self._options,
                allow_tool_calls=self._calls,
                template=self._template,
                add_special_tokens=bool(request.add_special_tokens),
                mm_processor_kwargs=kwargs,
                client=self._client,
            )
            if request.continue_final_message and not (prompt.text or "").endswith(self.echoed):
                self.echoed = self.echoed.rstrip()  # the template trimmed it; the answer begins with the space
        else:
            tail = request.prompt_token_ids[-NUM_TAIL_TOKENS:]
            end = gateway.input_processor.tokenizer.decode(tail, skip_special_tokens=False)
            config = parser_config(end, [], {"tools": self._options.get("tools")}, self._calls)
            prompt = TokenizedPrompt(request.prompt_token_ids, parser_config=config)
        if request.truncate_prompt_tokens is None:
            return prompt
        max_tokens = request.max_completion_tokens or request.max_tokens or 1
        room = gateway.engine_pool.known_engine().max_model_len - max_tokens
        return truncate(prompt, request, room)

    def _check_images(self) -> None:
        """Raise ``PenstockError`` (``unsupported``) for fields that cannot be combined with images."""
        request = self._request
        unsupported = {
            "disable_chat_template": bool(request.disable_chat_template),
            "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
            "echo": bool(request.echo),
        }
        for name in [name for name, given in unsupported.items() if given]:
            raise PenstockError(Code.UNSUPPORTED, f"{name}: is not supported with images: remove it", name)

    def _template_variables(self, request: ChatRequest, unknown: UnknownFields) -> dict[str, Any]:
        """Return ``documents`` and ``reasoning_effort`` for the template. If the model's template does not read them,
        documents are rejected, and the effort, which clients send to any model, is ignored as an unknown field."""
        fields = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
        given = {name: value for name, value in fields.items() if value is not None}
        if self._template is None:
            template = self._gateway.input_processor.tokenizer.template_for(tools=bool(request.tools))
            for name in given.keys() - template.variables:
                if name == "documents" or unknown.strict:
                    message = f"{name}: this model's chat template does not read it: remove it"
                    raise PenstockError(Code.UNSUPPORTED, message, name)
                unknown.ignore("", name)
                del given[name]
        return given


def memory_of(prompt: TokenizedPrompt) -> int:
    """Approximate memory of a prompt in bytes: text, tokens and pixels."""
    pixels = sum([len(image.pixels) for image in prompt.images])
    return getsizeof(prompt.text or "") + TOKEN_BYTES * len(prompt.token_ids) + pixels


def _num_characters(message: dict[str, Any]) -> int:
    """Number of characters of a message's text."""
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def truncate(prompt: TokenizedPrompt, request: PromptRequest, max_tokens: int, side: str = "left") -> TokenizedPrompt:
    """Apply ``truncate_prompt_tokens`` to a prompt. The response's header reports the number of removed tokens.

    Args:
        max_tokens: limit for -1: number of tokens that fit into the context.
        side: default of ``truncation_side``: ``left`` removes the beginning, ``right`` the end.
    """
    limit = request.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for the maximum that fits, is 0", 1)
    max_tokens = max(max_tokens, 1) if limit == -1 else limit
    token_ids = prompt.token_ids
    kept = token_ids[:max_tokens] if (request.truncation_side or side) == "right" else token_ids[-max_tokens:]
    return msgspec.structs.replace(prompt, token_ids=kept, num_truncated=len(token_ids) - len(kept))
