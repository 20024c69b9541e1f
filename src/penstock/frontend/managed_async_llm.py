"""Methods of ``AsyncLLM`` that start, manage and stop its engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.config.options import LogLevel, LogOptions
from penstock.core import Code, Failure, PenstockError
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

from .arguments import RUNNING_CONTINUE, refuse
from .gateway import Gateway
from .hf_tokenizer import hugging_face_tokenizer
from .input_processor import InputProcessor
from .options import read_options
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .engine_args import EngineArgs

ENGINE_GONE = Failure(Code.UNAVAILABLE, "the engine has crashed too often and is not restarted")
CLOSED = Failure(Code.UNAVAILABLE, "this AsyncLLM is closed; create another one")


class ManagedAsyncLLM:
    """Base class of ``AsyncLLM``: an engine process and the methods that manage it."""

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
        self._closed = False
        """True after ``close`` or ``shutdown``."""
        self._starting = asyncio.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Create an ``AsyncLLM`` from ``AsyncEngineArgs``. Its engine starts on first use; end it with ``shutdown``, or
        ``await close()``."""
        return cls(**vars(engine_args))

    async def __aenter__(self) -> Self:
        """Start the engine. Raises ``PenstockError`` if it cannot start."""
        await self.started()
        return self

    async def started(self) -> Gateway:
        """Start the engine unless it runs. Returns its gateway. Raises ``PenstockError`` if it cannot start, or was
        closed."""
        async with self._starting:
            if self._closed:
                raise PenstockError.of(CLOSED)
            if self._gateway is None:
                await self._start()
            return self.gateway

    async def _start(self) -> None:
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> int:
        """Finish open requests, stop the engine and return its exit status; 0 if it was not started."""
        self._closed = True
        if self._process is None:
            return 0
        status = await self._process.close()
        await self._watch
        await self._control.close()
        await self.gateway.close()
        return status

    def shutdown(self, timeout: float | None = None) -> None:
        """Begin to stop the engine, without waiting for its end: it finishes its open requests, unless this process
        ends before.

        Args:
            timeout: ignored.
        """
        self._closed = True
        if self._process is not None:
            self._process.stop()

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters, from ``generation_config.json``: a copy, which may be changed."""
        return SamplingParams.of(self._input_processor.default_sampling)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as ``LLM.get_tokenizer``."""
        return self._hugging_face_tokenizer

    @cached_property
    def _hugging_face_tokenizer(self) -> Any:
        return hugging_face_tokenizer(self._input_processor.tokenizer)

    @property
    def gateway(self) -> Gateway:
        if self._gateway is None:
            raise invalid("engine", "is not started: use AsyncLLM as a context manager (async with AsyncLLM(…) as llm)")
        return self._gateway

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Cancel requests by id. Their last output has the ``finish_reason`` ``error``."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        (await self.started()).cancel(request_ids)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; running requests continue. Returns True, as vLLM does.

        Args:
            reset_running_requests: True is refused.
            reset_connector: ignored: the host's cache is emptied, too.
        """
        refuse(reset_running_requests=(reset_running_requests or None, RUNNING_CONTINUE))
        await (await self.started()).engine_pool.reset_prefix_cache()
        return True

    async def check_health(self) -> None:
        """Raise ``PenstockError`` if the engine is closed, has crashed too often, or cannot start."""
        (await self.started()).engine_pool.known_engine()

    async def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Load a LoRA adapter while requests are served; see ``LLM.load_lora_adapter``."""
        await (await self.started()).engine_pool.load_adapter(lora_name, str(lora_path))

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload a LoRA adapter; running requests that use it continue. See ``LLM.unload_lora_adapter``."""
        await (await self.started()).engine_pool.unload_adapter(lora_name)

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
        return any(state.is_paused for state in (await self.started()).engine_pool.states)

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
        return any(state.asleep for state in (await self.started()).engine_pool.states)

    async def _execute(self, operation: ModelAction) -> EngineState:
        await self.started()
        state = await self._control.execute(operation)
        if starts_engines(operation):
            with suppress(TimeoutError):  # an engine has died again
                await self.gateway.engine_pool.connected(READY_TIMEOUT)
        await self.gateway.engine_pool.synchronize()
        return state

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        if not self._process or not self._process.closing:
            self.gateway.engine_pool.stop_serving(ENGINE_GONE)
