"""Answers that consist of choices, as OpenAI's completions and chats and those of servers like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.serve.chat.request import GenerationRequest
from penstock.serve.generation import GenerationHandler
from penstock.serve.http.reply import DONE, encode, event

from .schema import usage_of


class ChoiceHandler(GenerationHandler):
    """Base of the handlers: a choice for each sequence, the usage, and ``DONE``."""

    request: GenerationRequest
    id: str
    created: int

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        """The whole choice of a sequence of prompt ``i``."""
        raise NotImplementedError

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        """The choices that a step adds to the stream of a sequence, each for one event."""
        raise NotImplementedError

    def response(self, choices: Any, usage: Any) -> msgspec.Struct:
        """An event's document."""
        raise NotImplementedError

    async def document(self, choices: Any, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The whole answer."""
        return self.response(choices, self.usage(outputs))

    async def chunk(self, choice: Any, output: RequestOutput) -> msgspec.Struct:
        """The document of an event with one choice."""
        return self.response([choice], self.step_usage(output))

    def usage(self, outputs: list[RequestOutput]) -> Any:
        """Token counts of the prompts and their sequences."""
        return usage_of(outputs)

    def step_usage(self, output: RequestOutput) -> Any:
        """The usage in the events of a step."""
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
        """The prompt, decoded where it was given in token ids."""
        if output.prompt is not None:
            return output.prompt
        tokenizer = self.service.gateway.input_processor.tokenizer
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
