"""Chat backend of a local engine, which runs in another process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Self

import msgspec

from penstock.core import Code, PenstockError
from penstock.frontend.async_llm import AsyncLLM
from penstock.serve.chat.messages import messages_of
from penstock.serve.chat.request import Message as RequestMessage
from penstock.text.generic_tools import NO_TOOLS

from .backend import Answer, ContextFull
from .conversation import TEMPLATE_KWARGS, Conversation, Message, to_sampling_params
from .tools import ToolCall


class Engine:
    """A model on this machine.

    Args:
        options: options of ``AsyncLLM``.
        name: name of the model for the user.
    """

    def __init__(self, options: Mapping[str, Any], name: str) -> None:
        self._llm = AsyncLLM(**options, log_level="warning")
        self._name = name
        self.about = name
        self.context: int | None = None

    async def __aenter__(self) -> Self:
        await self._llm.__aenter__()
        ready = self._llm.ready
        self.about = f"{self._name} on this machine ({ready.fingerprint})"
        self.context = ready.max_model_len
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._llm.close()

    async def answer(self, messages: list[Message], conversation: Conversation) -> AsyncGenerator[Answer, None]:
        processor = self._llm.gateway.input_processor
        if conversation.tools and processor.chats.response_formats().tools is None:
            raise PenstockError(Code.UNSUPPORTED, NO_TOOLS)
        given = to_sampling_params(conversation.sampling)
        names = conversation.sampling.keys() - {TEMPLATE_KWARGS}
        changes = {"max_tokens": None} | {name: getattr(given, name) for name in names}
        stream = self._llm.chat(
            messages_of(msgspec.convert(messages, list[RequestMessage]), processor.media.sees_images),
            self._llm.get_default_sampling_params().replace(**changes),
            conversation.tools or None,
            conversation.sampling.get(TEMPLATE_KWARGS),
        )
        async with aclosing(stream) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                if completion.failure and completion.failure.field == "prompt":
                    raise ContextFull(completion.failure.message)
                if completion.failure:
                    raise PenstockError.of(completion.failure)
                message = completion.message
                assert message is not None, "a chat's answer is parsed"
                yield Answer(
                    message.content,
                    message.reasoning_content,
                    tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
                    completion.finish_reason,
                    len(output.prompt_token_ids),
                    len(completion.token_ids),
                )
