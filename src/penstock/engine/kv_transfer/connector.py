"""The KV connector: an engine's interface to KV transfers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec

from penstock.checkpoint.kv_spec import TransferLayout, transfer_layouts
from penstock.checkpoint.model_config import ModelConfig
from penstock.config.addresses import join_address, split_address
from penstock.config.options import EngineOptions
from penstock.core import Code, EngineRequest, PenstockError
from penstock.core.errors import invalid
from penstock.planning.kv_size import kv_specs
from penstock.planning.model_size import size_of

from ..executor.base import Executor
from ..executor.cluster_secret import read_secret
from ..scheduling.scheduler import Scheduler
from ..step import ModelInfo
from .buffer import SLOT_TOKENS, TransferBuffer
from .endpoint import Endpoint
from .exports import KVExports
from .imports import KVImports
from .link import KVTransferOptions
from .messages import Instance, Start
from .sender import Cancelled


def model_layouts(
    options: EngineOptions, config: ModelConfig, info: ModelInfo, slot_tokens: int = SLOT_TOKENS
) -> list[TransferLayout]:
    """Layout in a slot of ``slot_tokens`` tokens, for each layer of the model."""
    specs = kv_specs(size_of(config), slot_tokens, options.kv_cache_dtype, info.dtype)
    return transfer_layouts(specs, slot_tokens)


def new_transfer_buffer(options: EngineOptions, layouts: list[TransferLayout], state_bytes: int = 0) -> TransferBuffer:
    """Create an engine's transfer buffer.

    Args:
        state_bytes: bytes of a sequence's recurrent states on each rank; 0 without such states.

    Raises ``PenstockError`` if ``kv_buffer_size`` is less than one slot and a sequence's states, or the engine runs on
    several nodes.
    """
    if options.nnodes > 1:
        message = f"must be mixed for an instance on several nodes (nnodes {options.nnodes}), is {options.role}"
        raise PenstockError(Code.UNSUPPORTED, message, "role")
    slot_bytes = layouts[0].slot_bytes if layouts else state_bytes
    offsets = [layout.offset for layout in layouts] or [0]
    state_slots = -(-state_bytes // slot_bytes) * options.tensor_parallel_size * options.pipeline_parallel_size
    slots = options.kv_buffer_size // slot_bytes
    if slots < (needed := bool(layouts) + state_slots):
        size = needed * slot_bytes
        contents = [f"the KV of {SLOT_TOKENS} tokens"] * bool(layouts) + ["a sequence's recurrent states"] * bool(
            state_slots
        )
        message = f"must be at least {size} bytes, {' and '.join(contents)}, is {options.kv_buffer_size} bytes"
        raise invalid("kv_buffer_size", message, size)
    return TransferBuffer(slots, [*offsets, slot_bytes], state_slots, has_tokens=bool(layouts))


def _stages_of_layouts(stages: Sequence[range], config: ModelConfig, count: int) -> list[range]:
    """Split the ``count`` layers that have keys and values among the pipeline stages."""
    ends = [sum(map(config.has_kv, range(layers.stop))) for layers in stages[:-1]] + [count]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class KVConnector:
    """KV transfers of an engine, as prefill or decode instance. Not thread-safe: use it in the engine's thread.

    Args:
        add: argument of ``KVExports``.
        adapter_version: argument of ``KVExports``.
        state_bytes: largest number of bytes of a sequence's recurrent states on a rank.
        stages: layers of each pipeline stage.

    Raises ``PenstockError`` (``invalid``) if the cluster secret is missing or a prefill engine cannot listen.
    """

    def __init__(
        self,
        options: EngineOptions,
        config: ModelConfig,
        info: ModelInfo,
        buffer: TransferBuffer,
        executor: Executor,
        scheduler: Scheduler,
        *,
        add: Callable[[EngineRequest], None],
        adapter_version: Callable[[str], str],
        state_bytes: int = 0,
        stages: Sequence[range],
    ) -> None:
        layouts = model_layouts(options, config, info)
        self.buffer = buffer
        self._weights_version = info.weights_version
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """File descriptor (``eventfd``) that is readable when ``poll`` has work."""
        self._activity: Future[None] = Future()
        """Future that is done when an event has arrived since the last ``poll``."""
        instance = Instance(
            weights_version=info.weights_version,
            fingerprint=info.fingerprint,
            layers=[(layout.kv_heads, layout.vector_bytes, layout.numbers) for layout in layouts],
            states=(options.tensor_parallel_size, [layers.stop for layers in stages], state_bytes)
            if state_bytes
            else None,
        )
        host = options.kv_host or split_address(options.engine_address or "127.0.0.1:0", "engine_address")[0]
        transfer_options = KVTransferOptions(
            secret=read_secret(options.cluster_secret_file, make=True),
            timeout=options.kv_timeout,
            listen=join_address(host, options.kv_port) if options.role == "prefill" else "",
            allow_fingerprint_mismatch=options.allow_fingerprint_mismatch,
            transport=options.kv_transport,
        )
        stages_of_layouts = [
            (layers, list(range(stage * options.tensor_parallel_size, (stage + 1) * options.tensor_parallel_size)))
            for stage, layers in enumerate(_stages_of_layouts(stages, config, len(layouts)))
            if layers
        ]
        try:
            self.endpoint = Endpoint(instance, buffer, stages_of_layouts, transfer_options, self._wake)
        except OSError as error:
            message = f"cannot listen at {transfer_options.listen} for KV transfers: {error.strerror}; set another port"
            raise invalid("kv_port", message) from error
        self.address = ""
        """Address (``host:port``) of a prefill engine for decode engines; empty for a decode engine."""
        if self.endpoint.port:
            self.address = options.kv_advertised_address or join_address(host, self.endpoint.port)
        self.imports = KVImports(self.endpoint, executor, scheduler.kv, options, info.weights_version)
        self.exports = KVExports(self.endpoint, executor, scheduler, add=add, adapter_version=adapter_version)
        scheduler.before_release = self.exports.before_release

    def set_weights(self, version: str) -> None:
        """Use another version of the weights: end all transfers, and accept only KV of this version."""
        self._weights_version = version
        self.endpoint.set_weights(version)
        self.imports.set_weights(version)

    def set_suspended(self, suspended: bool) -> None:
        """Suspend (True) or resume (False) transfers: a sleeping engine has no KV cache. Suspending ends the current
        transfers."""
        if suspended and not self.imports.suspended:
            self.set_weights(self._weights_version)
        self.imports.suspended = self.exports.suspended = suspended

    @property
    def activity(self) -> Future[None]:
        """Future that is done when ``poll`` has work."""
        return self._activity

    @property
    def busy(self) -> bool:
        """True if ``poll`` has work."""
        return self._activity.done() or self.imports.busy or self.exports.busy

    @property
    def has_unread(self) -> bool:
        """True if the buffer holds exports that decode engines have not read, or imports of this engine."""
        return self.buffer.num_free < self.buffer.num_slots

    def poll(self) -> None:
        """Handle events, and continue imports and exports between two steps. Raises ``WorkerLostError``."""
        if self._activity.done():
            self._activity = Future()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wakeup)
        for event in self.endpoint.take_events():
            if isinstance(event, Start | Cancelled):
                self.exports.handle(event)
            else:
                self.imports.handle(event)
        self.imports.poll()
        self.exports.poll()

    @property
    def counts(self) -> dict[str, Any]:
        """Counters since the start (``TransferStats``, recomputed requests, seconds), and the use of the transfer
        buffer."""
        return msgspec.structs.asdict(self.endpoint.stats) | {
            "recomputed": self.imports.num_recomputed,
            "seconds": self.imports.seconds,
            "slots": self.buffer.num_slots,
            "slots_used": self.buffer.num_slots - self.buffer.num_free,
        }

    def close(self) -> None:
        """End all transfers, and close all file descriptors."""
        self.endpoint.close()
        if self.wakeup >= 0:
            self.buffer.close()
            os.close(self.wakeup)
            self.wakeup = -1

    def _wake(self) -> None:
        """Request a ``poll``. Called in the endpoint's thread."""
        os.eventfd_write(self.wakeup, 1)  # first, since ``poll`` reads the eventfd once the future is done
        with contextlib.suppress(InvalidStateError):
            self._activity.set_result(None)
