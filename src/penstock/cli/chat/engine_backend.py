"""The backend of a local engine, in another process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from penstock.core import PenstockError
from penstock.frontend.async_llm import AsyncLLM

from .backend import Answer, ContextFull
from .conversation import Message, to_sampling_params


class Engine:
    """A model on this machine.

    Args:
        options: of ``AsyncLLM``.
        name: what the model is called.
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._llm.close()

    async def answer(self, messages: list[Message], sampling: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        given = to_sampling_params(sampling)
        changes = {"max_tokens": None} | {name: getattr(given, name) for name in sampling}
        stream = self._llm.chat(messages, self._llm.get_default_sampling_params().replace(**changes))
        async with aclosing(stream) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                if completion.failure and completion.failure.field == "prompt":
                    raise ContextFull(completion.failure.message)
                if completion.failure:
                    raise PenstockError.of(completion.failure)
                yield Answer(
                    completion.text, completion.finish_reason, len(output.prompt_token_ids), len(completion.token_ids)
                )
