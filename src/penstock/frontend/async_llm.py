"""``AsyncLLM``: streaming outputs from an engine in a separate process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.config.options import LogLevel, LogOptions
from penstock.core import Code, Failure, LoRARequest, PoolingParams, SamplingParams
from penstock.core.errors import invalid
from penstock.engine.modes import PauseMode, ReloadMode
from penstock.engine.service.actions import EngineState, PauseGeneration, ResumeGeneration, Sleep, WakeUp
from penstock.engine.service.control import (
    READY_TIMEOUT,
    ModelAction,
    ModelControl,
    RestartEngines,
    UpdateWeights,
    starts_engines,
)
from penstock.engine.service.engine_processes import EngineProcesses
from penstock.engine.service.messages import Ready
from penstock.engine.service.pool import ResumePolicy

from .fastdeploy_outputs import FastDeployOutput
from .gateway import Gateway
from .input_processor import NO_GENERATION, InputProcessor
from .options import read_options
from .outputs import EmbeddingRequestOutput, RequestOutput
from .prompts import Messages, Prompt

ENGINE_GONE = Failure(Code.UNAVAILABLE, "the engine has crashed too often and is not restarted")


class AsyncLLM:
    """A model with an engine process, for asynchronous generation.

    Examples:
        >>> async with AsyncLLM() as llm:
        ...     async for output in llm.generate("Once upon a time"):
        ...         print(output.outputs[0].text)

    Takes the arguments of ``LLM``. The engine starts when the context is entered. If it crashes, it is restarted, and
    open requests continue (option ``resume``). The engine logs messages of at least ``log_level`` to standard error.
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
        """Start the engine. Raises ``PenstockError`` if it cannot start."""
        self._process = EngineProcesses(self.options, self._logs)
        self.ready: Ready = await self._process.start()
        self._watch = asyncio.create_task(self._process.watch())
        self._gateway = Gateway(
            self._process.addresses,
            self._input_processor,
            self.options.data_parallel_request_cost,
            resume=ResumePolicy.of(self.options),
        )
        self._control = ModelControl(self._process, self._use_new_engines)
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
        """Finish open requests, stop the engine and return its exit status."""
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
            raise invalid("engine", "is not started: use AsyncLLM as a context manager (async with AsyncLLM(…) as llm)")
        return self._gateway

    async def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Load a LoRA adapter while requests are served; see ``LLM.load_lora_adapter``."""
        await self.gateway.engine_pool.load_adapter(lora_name, str(lora_path))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload a LoRA adapter; running requests that use it continue. See ``LLM.unload_lora_adapter``."""
        await self.gateway.engine_pool.unload_adapter(lora_name)

    async def update_weights(self, path: str | Path = "", running: ReloadMode = "finish") -> str:
        """Replace the model's weights while requests are served. On an error the old weights stay in use.

        Args:
            path: folder of a checkpoint of the same model; empty: reload the current checkpoint.
            running: how running requests are handled. ``finish``: they finish with the old weights, and new requests
                wait. ``recompute``: their KV cache is recomputed with the new weights, and they continue after the
                tokens generated so far. ``restart``: a new engine process loads the new weights (see ``restart``), and
                the old one finishes its requests within ``drain_timeout``.

        Returns:
            The version of the new weights, as in ``RequestOutput.weights_version``.

        Raises ``PenstockError`` as ``LLM.update_weights``.
        """
        folder = str(Path(path).absolute()) if path else ""
        state = await self._execute(UpdateWeights(folder, running))
        return state.weights_version

    async def restart(self) -> None:
        """Replace each engine process by a new one. Running requests continue in the new one with the same output. It
        starts next to the old one if memory allows, otherwise after it.

        Raises ``PenstockError`` if the new process cannot start, or while the engine is paused or sleeps.
        """
        await self._execute(RestartEngines())

    async def _use_new_engines(self) -> None:
        assert self._process is not None
        self.gateway.engine_pool.set_engines(self._process.addresses)
        await self.gateway.engine_pool.connected()

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause the engine until ``resume_generation``; new requests wait.

        Args:
            mode: how open requests are handled. ``abort``: they fail. ``wait``: running requests finish first.
                ``keep``: they continue after the pause.
            clear_cache: empty the prefix cache, except with mode ``keep``.
        """
        await self._execute(PauseGeneration(mode, clear_cache))

    async def resume_generation(self) -> None:
        """Resume after ``pause_generation``."""
        await self._execute(ResumeGeneration())

    async def is_paused(self) -> bool:
        """True after ``pause_generation`` or ``sleep``."""
        return any(state.is_paused for state in self.gateway.engine_pool.states)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free the KV cache, and with level 2 the weights (see ``LLM.sleep``); new requests fail until ``wake_up``.

        Args:
            mode: how open requests are handled, as for ``pause_generation``.
        """
        await self._execute(Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Reload the weights and KV cache that ``sleep`` has freed; see ``LLM.wake_up``."""
        await self._execute(WakeUp(None if tags is None else tuple(tags)))

    async def is_sleeping(self) -> bool:
        """True if KV cache or weights are freed."""
        return any(state.asleep for state in self.gateway.engine_pool.states)

    async def _execute(self, operation: ModelAction) -> EngineState:
        state = await self._control.execute(operation)
        if starts_engines(operation):
            with suppress(TimeoutError):  # an engine has died again
                await self.gateway.engine_pool.connected(READY_TIMEOUT)
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
        """Generate from a prompt; yields the cumulative output after each step.

        Args:
            lora_request: LoRA adapter; loaded from its folder if it is not loaded yet.
            options: other arguments of ``Gateway.generate``.
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
        """Embed a prompt.

        Args:
            pooling_params: pooling parameters; None: the checkpoint's defaults.
            options: arguments of ``generate``.

        Raises ``PenstockError`` if the request is invalid or fails.
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
        """Generate the answer to a chat; ``options`` are arguments of ``generate``."""
        size = sum(len(str(message.get("content"))) for message in messages)
        variables = {"tools": tools, **(chat_template_kwargs or {})}
        prompt = await self.gateway.chat_prompt(messages, size, variables, allow_tool_calls=bool(tools))
        if tools:
            sampling_params = self._input_processor.constrain_tool_calls(sampling_params, tools)
        async with aclosing(self.generate(prompt, sampling_params, **options)) as outputs:
            async for output in outputs:
                yield output

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        if not self._process or not self._process.closing:
            self.gateway.engine_pool.stop_serving(ENGINE_GONE)
