"""``AsyncLLM``: streaming outputs from an engine in a separate process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from penstock import core
from penstock.core import LoRARequest, PoolingParams
from penstock.core.errors import invalid

from .arguments import (
    AnySamplingParams,
    as_conversations,
    as_tools,
    checked_call,
    described,
    loras_of,
    poolings_of,
    refuse,
    sampling_of,
)
from .fastdeploy_outputs import FastDeployOutput
from .generating_llm import AS_NEEDED, NO_TOKENIZER_OPTIONS
from .input_processor import NO_GENERATION
from .managed_async_llm import ManagedAsyncLLM
from .output_kinds import Deltas
from .outputs import EmbeddingRequestOutput, PoolingRequestOutput, RequestOutput
from .pooling_config import PoolingTask
from .prompts import Messages, Prompt, TokenizedPrompt, salt_of
from .sampling_params import RequestOutputKind, SamplingParams


class AsyncLLM(ManagedAsyncLLM):
    """A model with an engine process, for asynchronous generation.

    Examples:
        >>> async with AsyncLLM() as llm:
        ...     async for output in llm.generate("Once upon a time"):
        ...         print(output.outputs[0].text)

    Takes the arguments of ``LLM``. The engine starts when the context is entered, or on first use. If it crashes, it is
    restarted, and open requests continue (option ``resume``). The engine logs messages of at least ``log_level`` to
    standard error.
    """

    @checked_call
    def generate(
        self,
        prompt: Prompt,
        sampling_params: AnySamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate from a prompt; yields an output after each step. The outputs are cumulative, unless
        ``sampling_params.output_kind`` selects others.

        Args:
            request_id: ``request_id`` of the outputs, for ``abort``; None: a number.
            lora_request: LoRA adapter; loaded from its folder if it is not loaded yet.
            priority: for ``scheduling_policy`` ``priority``.
            timeout: seconds until the request fails; None: no limit.
            cache_salt: cached prefixes are shared only among requests with the same salt; empty: that of the prompt.
            tokenization_kwargs: refused if not empty.

        Raises ``PenstockError`` if the request is invalid, or the engine cannot start.
        """
        refuse(tokenization_kwargs=(tokenization_kwargs, NO_TOKENIZER_OPTIONS))
        options = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt or salt_of(prompt)}
        return self._stream(prompt, sampling_params, request_id, lora_request, _kind(sampling_params), **options)

    def _stream(
        self,
        prompt: Prompt,
        sampling_params: AnySamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | None,
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check the arguments of a request, and run it; ``options`` are arguments of ``Gateway.generate``."""
        if not isinstance(request_id, str | None):
            raise invalid("request_id", f"must be a string, is {described(request_id)}")
        if not isinstance(prompt, str | Mapping | Sequence | TokenizedPrompt):
            raise invalid("prompt", f"must be text, token ids, or a dict, is {described(prompt)}")
        (adapter,) = loras_of(lora_request, 1)
        outputs = self._outputs(prompt, sampling_of(sampling_params), request_id, adapter, **options)
        return self._of_kind(outputs, kind)

    async def _outputs(
        self,
        prompt: Prompt,
        sampling: core.SamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        adapter = lora_request.lora_name if lora_request else ""
        if lora_request and lora_request.lora_path:
            await self.load_lora_adapter(adapter, lora_request.lora_path)
        arrived, gateway = time.monotonic(), await self.started()
        tokenized = await gateway.tokenize(prompt, options.get("timeout"))
        options = {"adapter": adapter, "arrived": arrived, **options}
        async with aclosing(gateway.generate(tokenized, sampling, request_id, **options)) as outputs:
            async for output in outputs:
                output.lora_request = lora_request
                yield output

    async def _of_kind(
        self, stream: AsyncGenerator[RequestOutput, None], kind: RequestOutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        """Convert cumulative outputs to those of ``kind``."""
        deltas = Deltas()
        async with aclosing(stream) as outputs:
            async for output in outputs:
                if kind is RequestOutputKind.FINAL_ONLY and not output.finished:
                    continue
                chosen = deltas.next(output) if kind is RequestOutputKind.DELTA else output
                yield FastDeployOutput.of(chosen) if self._fastdeploy else chosen

    @checked_call
    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        timeout: float | None = None,
    ) -> EmbeddingRequestOutput:
        """Embed a prompt.

        Args:
            pooling_params: pooling parameters; None: the checkpoint's defaults.
            request_id, lora_request, timeout: as for ``generate``.

        Raises ``PenstockError`` if the request is invalid or fails.
        """
        (params,) = poolings_of(pooling_params, 1)
        pooling = self._input_processor.pooler.embedding_params(params)
        return EmbeddingRequestOutput.of(await self._pooled(prompt, pooling, request_id, lora_request, timeout))

    @checked_call
    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt to a vector, or to one vector per token; yields one output.

        Args:
            pooling_task: as for ``LLM.encode``.
            request_id, lora_request, timeout: as for ``generate``.

        Raises ``PenstockError`` if the request is invalid or fails.
        """
        (params,) = poolings_of(pooling_params, 1)
        pooling = self._input_processor.pooler.params(pooling_task, params)
        output = await self._pooled(prompt, pooling, request_id, lora_request, timeout)
        yield PoolingRequestOutput.of(output, pooling.pooling_type == "all")

    async def _pooled(
        self,
        prompt: Prompt,
        pooling: PoolingParams,
        request_id: str | None,
        lora_request: LoRARequest | None,
        timeout: float | None,
    ) -> RequestOutput:
        stream = self._stream(prompt, NO_GENERATION, request_id, lora_request, pooling=pooling, timeout=timeout)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                last = output
        return last

    @checked_call
    async def chat(
        self,
        messages: Messages,
        sampling_params: AnySamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        chat_template_content_format: str = "auto",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the answer to a chat; arguments as for ``LLM.chat`` and ``generate``."""
        content_format = None if chat_template_content_format == "auto" else chat_template_content_format
        refuse(chat_template_content_format=(content_format, AS_NEEDED))
        if len(chats := as_conversations(messages)) > 1 or chats[0] is not messages:
            raise invalid("messages", "has several chats: call chat for each")
        tools, inputs = as_tools(tools), self._input_processor
        template, sampling = inputs.chat_template(chat_template), sampling_of(sampling_params)
        if tools:
            sampling = inputs.constrain_tool_calls(sampling, tools, template)
        size = sum(len(str(message.get("content"))) for message in messages)
        variables = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        prompt = await (await self.started()).chat_prompt(
            messages,
            size,
            variables,
            allow_tool_calls=bool(tools),
            template=template,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        kind = _kind(sampling_params)
        stream = self._stream(prompt, sampling, request_id, lora_request, kind, priority=priority, timeout=timeout)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output


def _kind(params: AnySamplingParams | None) -> RequestOutputKind:
    return params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.CUMULATIVE
