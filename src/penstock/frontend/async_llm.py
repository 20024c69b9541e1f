"""``AsyncLLM``: streaming, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.config.options import LogLevel, LogOptions
from penstock.core import Code, Failure, LoRARequest, PoolingParams, SamplingParams
from penstock.core.errors import invalid
from penstock.engine.modes import PauseMode, WeightUpdateMode
from penstock.engine.service.actions import EngineState, PauseGeneration, ResumeGeneration, Sleep, WakeUp
from penstock.engine.service.control import ModelAction, ModelControl, UpdateWeights
from penstock.engine.service.launcher import EngineProcesses
from penstock.engine.service.messages import Ready

from .fastdeploy_outputs import FastDeployOutput
from .gateway import Gateway
from .input_processor import NO_GENERATION, InputProcessor
from .options import read_options
from .outputs import EmbeddingRequestOutput, RequestOutput
from .prompts import Messages, Prompt

ENGINE_GONE = Failure(Code.UNAVAILABLE, "the engine has died too often and is not started again")


class AsyncLLM:
    """A model with its engine process, for streaming.

    Examples:
        >>> async with AsyncLLM() as llm:
        ...     async for output in llm.generate("Once upon a time"):
        ...         print(output.outputs[0].text)

    Arguments are those of ``LLM``. The engine starts on entering, and again by itself if it dies; what was open then
    ends with a failure at once. The engine writes to standard error what is of ``log_level`` at least.
    """

    def __init__(
        self, model: str | Path = "", *, compat: str = "", log_level: LogLevel = "info", **options: Any
    ) -> None:
        self._logs = LogOptions(log_level=log_level)
        model_options, self.options = read_options(model, compat, options)
        self._fastdeploy = compat == "fastdeploy"
        max_output_len = self.options.max_output_len
        self._input_processor = InputProcessor(self.options.model, model_options, max_output_len, check_types=True)
        self._process: EngineProcesses | None = None
        self._gateway: Gateway | None = None

    async def __aenter__(self) -> Self:
        """Raises ``PenstockError`` with one sentence where the engine cannot start."""
        self._process = EngineProcesses(self.options, self._logs)
        self.ready: Ready = await self._process.start()
        self._watch = asyncio.create_task(self._process.watch())
        self._gateway = Gateway(self._process.addresses, self._input_processor, self.options.data_parallel_request_cost)
        self._control = ModelControl(self._process)
        self._watch.add_done_callback(self._on_watch_end)
        try:
            await self._gateway.engine_pool.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> int:
        """Stop the engine after its open requests; returns its exit status."""
        assert self._process is not None
        status = await self._process.close()
        await self._watch
        await self._control.close()
        await self.gateway.close()
        return status

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters, from ``generation_config.json``."""
        return self._input_processor.default_sampling

    @property
    def gateway(self) -> Gateway:
        if self._gateway is None:
            raise invalid("engine", "enter the AsyncLLM first: async with AsyncLLM(…) as llm")
        return self._gateway

    async def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """As ``LLM.load_lora_adapter``, while requests are served."""
        await self.gateway.engine_pool.load_adapter(lora_name, str(lora_path))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """As ``LLM.unload_lora_adapter``; requests that have begun with it go on."""
        await self.gateway.engine_pool.unload_adapter(lora_name)

    async def update_weights(self, path: str | Path = "", running: WeightUpdateMode = "finish") -> str:
        """Change the model's weights while requests are served. Where this fails, nothing has changed.

        Args:
            path: folder of a checkpoint of the same model; empty reads the one in use again.
            running: whether running requests finish on the old weights, while new ones wait, or are computed again with
                the new ones, which go on after what was generated.

        Returns:
            The version of the weights, which ``RequestOutput.weights_version`` repeats.

        Raises ``PenstockError`` as ``LLM.update_weights``.
        """
        folder = str(Path(path).absolute()) if path else ""
        state = await self._execute(UpdateWeights(folder, running))
        return state.weights_version

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Compute nothing until ``resume_generation``; requests that come wait.

        Args:
            mode: whether open requests fail (``abort``), finish if they have begun (``wait``), or stay where they are.
            clear_cache: empty the prefix cache, unless requests are kept.
        """
        await self._execute(PauseGeneration(mode, clear_cache))

    async def resume_generation(self) -> None:
        """Compute again after ``pause_generation``."""
        await self._execute(ResumeGeneration())

    async def is_paused(self) -> bool:
        """Whether nothing is computed, after ``pause_generation`` or ``sleep``."""
        return any(state.is_paused for state in self.gateway.engine_pool.states)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """As ``LLM.sleep``; requests that come are refused until ``wake_up``.

        Args:
            mode: of open requests, as for ``pause_generation``.
        """
        await self._execute(Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As ``LLM.wake_up``."""
        await self._execute(WakeUp(None if tags is None else tuple(tags)))

    async def is_sleeping(self) -> bool:
        """As ``LLM.is_sleeping``."""
        return any(state.asleep for state in self.gateway.engine_pool.states)

    async def _execute(self, operation: ModelAction) -> EngineState:
        state = await self._control.execute(operation)
        await self.gateway.engine_pool.synchronize()
        return state

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output so far, after every step that added to it.

        Args:
            lora_request: an adapter, which is loaded from its folder where it is not loaded yet.
            options: those of ``Gateway.generate``.
        """
        adapter = lora_request.lora_name if lora_request else ""
        if lora_request and lora_request.lora_path:
            await self.load_lora_adapter(adapter, lora_request.lora_path)
        arrived = time.monotonic()
        tokenized = await self.gateway.tokenize(prompt, options.get("timeout"))
        stream = self.gateway.generate(
            tokenized, sampling_params, request_id, **{"adapter": adapter, "arrived": arrived, **options}
        )
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield FastDeployOutput.of(output) if self._fastdeploy else output

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, **options: Any
    ) -> EmbeddingRequestOutput:
        """Embed a prompt; None is the checkpoint's pooling. ``options`` are those of ``generate``.

        Raises ``PenstockError`` where the request is wrong or has failed.
        """
        pooling = self._input_processor.pooler.embedding_params(pooling_params)
        async with aclosing(self.generate(prompt, NO_GENERATION, pooling=pooling, **options)) as outputs:
            async for output in outputs:
                last = output
        return EmbeddingRequestOutput.of(last)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a chat; ``options`` are those of ``generate``."""
        size = sum(len(str(message.get("content"))) for message in messages)
        variables = {"tools": tools, **(chat_template_kwargs or {})}
        prompt = await self.gateway.chat_prompt(messages, size, variables, allow_tool_calls=bool(tools))
        async with aclosing(self.generate(prompt, sampling_params, **options)) as outputs:
            async for output in outputs:
                yield output

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        if not self._process or not self._process.closing:
            self.gateway.engine_pool.stop_serving(ENGINE_GONE)
