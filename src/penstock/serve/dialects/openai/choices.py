"""Base class of handlers of OpenAI's completions and chats: a response is a list of choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import GenerationRequest
from penstock.serve.generation import GenerationHandler
from penstock.serve.http.reply import DONE, encode, event

from .schema import usage_of


class ChoiceHandler(GenerationHandler, ABC):
    """Base class of handlers that respond with one choice per sequence and the usage. Streams end with ``DONE``."""

    request: GenerationRequest
    id: str
    created: int

    @abstractmethod
    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        """The choice of a finished sequence of prompt ``i``."""

    @abstractmethod
    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        """The choices for the output of one step of a sequence. Each choice is sent as one event."""

    @abstractmethod
    def response(self, choices: Any, usage: Any) -> msgspec.Struct:
        """The response object of one event."""

    async def document(self, choices: Any, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The response object of a request that is not streamed."""
        return self.response(choices, self.usage(outputs))

    async def chunk(self, choice: Any, output: RequestOutput) -> msgspec.Struct:
        """The response object of an event with one choice."""
        return self.response([choice], self.step_usage(output))

    def usage(self, outputs: list[RequestOutput]) -> Any:
        """Token counts of the prompts and their sequences."""
        return usage_of(outputs)

    def step_usage(self, output: RequestOutput) -> Any:
        """The ``usage`` field of the events of a step; ``UNSET`` without ``stream_options.include_usage``."""
        options = self.request.stream_options
        if not (options and options.include_usage):
            return UNSET
        return self.usage([output]) if options.continuous_usage_stats else None

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        choices = [
            await self.choice(i, output, completion)
            for i, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return encode(await self.document(choices, outputs))

    async def format_chunk(self, index: int, output: RequestOutput) -> bytes:
        events = []
        for completion in output.outputs:
            for choice in await self.chunks(index, output, completion):
                events.append(event(await self.chunk(choice, output)))
        return b"".join(events)

    def format_end(self) -> bytes:
        options = self.request.stream_options
        if not (options and options.include_usage):
            return DONE
        return event(self.response([], self.usage([*self.last.values()]))) + DONE

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt as text; a prompt of token ids is decoded."""
        if output.prompt is not None:
            return output.prompt
        tokenizer = self.service.gateway.input_processor.tokenizer
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
