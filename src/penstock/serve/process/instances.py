"""Instances of a router: discovery, compatibility checks, and selection of the instances in use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from penstock.cluster.http import INSTANCE_PATH, InstanceInfo, call
from penstock.config.addresses import reachable, split_address
from penstock.config.options import Configuration
from penstock.core import PenstockError
from penstock.engine.executor.cluster_secret import read_secret
from penstock.engine.service.client import EngineClient
from penstock.engine.service.instance import Instance, tokenizer_version
from penstock.engine.service.messages import Ready

from ..models.messages import INSTANCES

logger = logging.getLogger("penstock")

POLL_INTERVAL, POLL_INTERVAL_USED = 0.5, 2.0
"""Seconds between polls of a configured instance's server, before and after it is in use. An instance may restart with
other ports."""
REGISTRATION_TIMEOUT = 8.0
"""Seconds without a registration after which a registered instance is removed."""
PROGRESS_INTERVAL = 10.0
"""Seconds between log lines about missing instances."""


class _Engine:
    """An engine of a configured or registered instance.

    Args:
        expected: roles that the engine may have.
    """

    def __init__(self, client: EngineClient, expected: tuple[str, ...]) -> None:
        self.client = client
        self.expected = expected
        self.instance: Instance | None = None
        """Announcement to the API processes; None: the engine is not in use."""
        self.mismatch = ""
        """Reason why the connected engine is not in use; empty: it is compatible."""


class Instances:
    """The instances that a router sends requests to, or that compute prompts for this server's engines.

    Has the interface of ``EngineProcesses``, which it replaces in a router.

    Args:
        on_change: called with the instances in use whenever they change.

    Raises ``PenstockError`` (``invalid``) for a malformed address.
    """

    addresses = (INSTANCES,)

    def __init__(self, configuration: Configuration, on_change: Callable[[tuple[Instance, ...]], None]) -> None:
        options = configuration.server
        self._allow_mismatch = configuration.engine.allow_fingerprint_mismatch
        self._secret = read_secret(configuration.engine.cluster_secret_file, make=True)
        self._on_change = on_change
        self._tokenizer = "" if configuration.model.tokenizer else tokenizer_version(configuration.engine.model)
        self._configured: list[tuple[str, tuple[str, ...]]] = [
            (text, ("prefill",)) for text in options.prefill_instances
        ]
        self._configured += [(text, ("decode", "mixed")) for text in options.decode_instances]
        for text, _ in self._configured:
            split_address(text.removeprefix("http://").removeprefix("https://").rstrip("/"), "instances")
        self._named: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """Engine addresses and allowed roles of each instance, by its configured or registered name."""
        self._last_registered: dict[str, float] = {}
        """Time of the last registration of each registered instance."""
        self._engines: dict[str, _Engine] = {}
        """Engines of all instances, by address."""
        self._announced: tuple[Instance, ...] = ()
        self._local_engine: Ready | None = None
        """Report of this server's engine; None: this server has no engine."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Future[None]] = set()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()

    # --- Interface of EngineProcesses -----------------------------------------------------------------------------

    @property
    def reports(self) -> list[Ready]:
        """Reports of engines on this host. Empty: a router runs no engine."""
        return []

    @property
    def closing(self) -> bool:
        return self._closed.is_set()

    async def start(self) -> Ready:
        """Start the discovery, wait for the first engine that can answer requests, and return its report."""
        self.start_discovery()
        return await self._ready

    async def watch(self) -> None:
        """Wait until ``close`` is called. The loss of instances is not a failure."""
        await self._closed.wait()

    async def close(self) -> int:
        if self._closed.is_set():
            return 0
        self._closed.set()
        for task in self._tasks:
            task.cancel()
        if not self._ready.done():
            self._ready.cancel()
        await asyncio.gather(
            *self._tasks,
            *(engine.client.close() for engine in self._engines.values()),
            *self._ending,
            return_exceptions=True,
        )
        return 0

    def kill(self) -> None:
        """Do nothing: instances are separate servers."""

    # --- Discovery ------------------------------------------------------------------------------------------------

    def start_discovery(self, local_engine: Ready | None = None) -> None:
        """Start to connect to the instances.

        Args:
            local_engine: report of this server's engine, with which the instances must be compatible.
        """
        self._local_engine = local_engine
        if self._tasks:  # the local engine was loaded again
            self._update_used()
            return
        for text, roles in self._configured:
            if "://" in text:
                self._tasks.append(asyncio.create_task(self._poll(text, roles)))
            else:
                self._set_engines(text, (text,), roles)
        self._tasks.append(asyncio.create_task(self._watch_registered()))
        if self._configured:
            self._tasks.append(asyncio.create_task(self._log_missing()))

    def register(self, name: str, engines: tuple[str, ...], leaves: bool) -> None:
        """Register or deregister an instance. Raises ``PenstockError`` (``invalid``) for a malformed address."""
        for address in engines:
            split_address(address, "engines")
        if leaves:
            self._remove(name, "left")
            return
        self._last_registered[name] = time.monotonic()
        self._set_engines(name, engines, ("prefill", "decode", "mixed"))

    def _remove(self, name: str, reason: str) -> None:
        if self._last_registered.pop(name, None) is not None:
            logger.info("the instance at %s %s", ", ".join(self._named[name][0]), reason)
            del self._named[name]
            self._connect()

    async def _watch_registered(self) -> None:
        while True:
            await asyncio.sleep(1)
            deadline = time.monotonic() - REGISTRATION_TIMEOUT
            for name in [name for name, registered in self._last_registered.items() if registered < deadline]:
                self._remove(name, f"has not registered for {REGISTRATION_TIMEOUT:.0f} seconds")

    async def _poll(self, url: str, roles: tuple[str, ...]) -> None:
        """Poll an instance's server for the addresses of its engines."""
        host = split_address(url.partition("://")[2].rstrip("/"), "instances")[0]
        last_error = ""
        while True:
            try:
                answer = await asyncio.to_thread(call, url, INSTANCE_PATH, self._secret)
                info = msgspec.convert(answer, InstanceInfo)
                if info.engines:
                    self._set_engines(url, tuple(reachable(engine.address, host) for engine in info.engines), roles)
                    last_error = ""
            except OSError:  # the instance has not started yet
                pass
            except (msgspec.ValidationError, PenstockError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    logger.warning("%s", last_error)
            await asyncio.sleep(POLL_INTERVAL_USED if self._is_used(url) else POLL_INTERVAL)

    async def _log_missing(self) -> None:
        """Log which configured instances are missing, until all have been in use at the same time."""
        await asyncio.sleep(1)
        while missing := [text for text, _ in self._configured if not self._is_used(text)]:
            logger.info("waiting for %s", ", ".join(missing))
            await asyncio.sleep(PROGRESS_INTERVAL)

    def _is_used(self, name: str) -> bool:
        addresses = self._named.get(name, ((), ()))[0]
        return any((engine := self._engines.get(address)) and engine.instance for address in addresses)

    def _set_engines(self, name: str, engines: tuple[str, ...], roles: tuple[str, ...]) -> None:
        if self._named.get(name) != (engines, roles):
            self._named[name] = engines, roles
            self._connect()

    def _connect(self) -> None:
        """Connect to all engines of the current instances, and disconnect from all other engines."""
        named = {address: roles for engines, roles in self._named.values() for address in engines}
        for address in [address for address in self._engines if address not in named]:
            closing = asyncio.ensure_future(self._engines.pop(address).client.close())
            self._ending.add(closing)
            closing.add_done_callback(self._ending.discard)
        for address, roles in named.items():
            if address not in self._engines:
                self._engines[address] = _Engine(self._client(address), roles)
        self._update_used()

    def _client(self, address: str) -> EngineClient:
        return EngineClient(
            f"tcp://{address}",
            on_deltas=lambda deltas: None,
            on_lost=lambda failure: self._update_used(),
            get_vocabulary=None,
            on_cancel=lambda request_ids: None,
            on_ready=lambda engine: self._update_used(),
            secret=self._secret,
        )

    # --- Selection ------------------------------------------------------------------------------------------------

    def _update_used(self) -> None:
        """Select the engines that are compatible with each other, and announce them if they have changed."""
        if self._closed.is_set():
            return
        engines = self._engines.values()
        current = (engine.client.engine for engine in engines if engine.instance and _is_unchanged(engine))
        reference = self._local_engine or next(current, None)
        for engine in engines:
            report = engine.client.engine
            if report is None:
                if engine.instance and reference and not self._is_compatible(engine.instance, reference):
                    engine.instance = None
                continue
            mismatch = self._mismatch(engine, report, reference)
            if mismatch and mismatch != engine.mismatch:
                logger.warning("the instance at %s is not used: %s", engine.client.name, mismatch)
            engine.mismatch = mismatch
            if mismatch:
                engine.instance = None
                continue
            reference = reference or report
            instance = Instance(engine.client.name, report.role, report.fingerprint, report.weights_version)
            if engine.instance != instance:
                engine.instance = instance
                logger.info("the %s instance at %s has joined", report.role, engine.client.name)
            if report.role != "prefill" and not self._ready.done():
                self._ready.set_result(report)
        announced = tuple(engine.instance for engine in engines if engine.instance)
        if announced != self._announced:
            self._announced = announced
            self._on_change(announced)

    def _mismatch(self, engine: _Engine, report: Ready, reference: Ready | None) -> str:
        """Reason why an engine cannot be used; empty: it can be used."""
        if report.role not in engine.expected:
            return f"its role is {report.role}, but it is configured as {' or '.join(engine.expected)}"
        if self._tokenizer and report.tokenizer_version and self._tokenizer != report.tokenizer_version:
            return "its tokenizer differs from the tokenizer of this router's model: use the same --model for both"
        if reference is None or reference is report:
            return ""
        if report.weights_version != reference.weights_version:
            return (
                f"its weights are {report.weights_version[:16]}, but the other instances have "
                f"{reference.weights_version[:16]}: use the same checkpoint for all"
            )
        if report.fingerprint != reference.fingerprint and not self._allow_mismatch:
            return (
                f"its results differ bitwise: its kernels are {report.fingerprint}, but the other instances have "
                f"{reference.fingerprint} (--allow-fingerprint-mismatch allows it)"
            )
        return ""

    def _is_compatible(self, instance: Instance, reference: Ready) -> bool:
        return instance.weights_version == reference.weights_version and (
            self._allow_mismatch or instance.fingerprint == reference.fingerprint
        )


def _is_unchanged(engine: _Engine) -> bool:
    """True if an engine in use is connected, and is the instance that was announced."""
    report, instance = engine.client.engine, engine.instance
    return report is not None and instance is not None and instance.matches(report)
