"""The instances of a router: finds them, learns what they are, and decides which of them are used."""

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

ASK_INTERVAL, ASK_AGAIN_INTERVAL = 0.5, 2.0
"""Seconds between two questions to an instance's server until it is used, and then: it may have started again, on other
ports."""
SILENCE = 8.0
"""Seconds without a word of a registered instance after which it is gone."""
PROGRESS_INTERVAL = 10.0
"""Seconds between two lines on instances that are missing."""


class _Found:
    """An engine at an address that a configured or registered instance has named.

    Args:
        expected: roles that it may have.
    """

    def __init__(self, client: EngineClient, expected: tuple[str, ...]) -> None:
        self.client = client
        self.expected = expected
        self.instance: Instance | None = None
        """What is announced of it; None where it is not used."""
        self.objection = ""
        """Why it is not used, of one that is connected."""


class Instances:
    """The instances that a router sends requests to, or that compute prompts for this server's own engines. It has the
    methods of ``EngineProcesses``, in whose place it is where there are no engines here.

    Args:
        on_change: called with those that are used whenever they change.

    Raises ``PenstockError`` (``invalid``) where an address is none.
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
        """By configured text or registered name: engines' addresses, and the roles that they may have."""
        self._heard: dict[str, float] = {}
        """When each registered instance was heard last."""
        self._found: dict[str, _Found] = {}
        """By the engine's address."""
        self._announced: tuple[Instance, ...] = ()
        self._own: Ready | None = None
        """The report of this server's own engine."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Future[None]] = set()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()

    # --- As EngineProcesses -----------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[Ready]:
        """Of engines on this host: none."""
        return []

    @property
    def closing(self) -> bool:
        return self._closed.is_set()

    async def start(self) -> Ready:
        """Look for the instances, and wait for the first that answers requests; returns its report."""
        self.begin()
        return await self._ready

    async def watch(self) -> None:
        """Returns after ``close``: instances come and go."""
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
            *(found.client.close() for found in self._found.values()),
            *self._ending,
            return_exceptions=True,
        )
        return 0

    def kill(self) -> None:
        """Instances are not this server's."""

    # --- Finding them -----------------------------------------------------------------------------------------------

    def begin(self, own: Ready | None = None) -> None:
        """Look for the instances.

        Args:
            own: the report of this server's own engine, which they have to fit.
        """
        self._own = own
        if self._tasks:  # the own engine was loaded again
            self._decide()
            return
        for text, roles in self._configured:
            if "://" in text:
                self._tasks.append(asyncio.create_task(self._ask(text, roles)))
            else:
                self._name(text, (text,), roles)
        self._tasks.append(asyncio.create_task(self._watch_registered()))
        if self._configured:
            self._tasks.append(asyncio.create_task(self._tell_progress()))

    def register(self, name: str, engines: tuple[str, ...], leaves: bool) -> None:
        """Note that an instance is there, or leaves. Raises ``PenstockError`` (``invalid``) for a wrong address."""
        for address in engines:
            split_address(address, "engines")
        if leaves:
            self._forget(name, "left")
            return
        self._heard[name] = time.monotonic()
        self._name(name, engines, ("prefill", "decode", "mixed"))

    def _forget(self, name: str, how: str) -> None:
        if self._heard.pop(name, None) is not None:
            logger.info("the instance at %s %s", ", ".join(self._named[name][0]), how)
            del self._named[name]
            self._follow_names()

    async def _watch_registered(self) -> None:
        while True:
            await asyncio.sleep(1)
            for name in [name for name, heard in self._heard.items() if time.monotonic() - heard > SILENCE]:
                self._forget(name, f"has not been heard for {SILENCE:.0f} seconds")

    async def _ask(self, url: str, roles: tuple[str, ...]) -> None:
        """Ask an instance's server, again and again, where its engines are."""
        host = split_address(url.partition("://")[2].rstrip("/"), "instances")[0]
        told = ""
        while True:
            try:
                answer = await asyncio.to_thread(call, url, INSTANCE_PATH, self._secret)
                info = msgspec.convert(answer, InstanceInfo)
                if info.engines:
                    self._name(url, tuple(reachable(engine.address, host) for engine in info.engines), roles)
                    told = ""
            except OSError:  # it has not started yet
                pass
            except (msgspec.ValidationError, PenstockError) as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("%s", told)
            await asyncio.sleep(ASK_AGAIN_INTERVAL if self._is_used(url) else ASK_INTERVAL)

    async def _tell_progress(self) -> None:
        """Log which configured instances are missing, until all have come once."""
        await asyncio.sleep(1)
        while missing := [text for text, _ in self._configured if not self._is_used(text)]:
            logger.info("waiting for %s", ", ".join(missing))
            await asyncio.sleep(PROGRESS_INTERVAL)

    def _is_used(self, name: str) -> bool:
        addresses = self._named.get(name, ((), ()))[0]
        return any((found := self._found.get(address)) and found.instance for address in addresses)

    def _name(self, name: str, engines: tuple[str, ...], roles: tuple[str, ...]) -> None:
        if self._named.get(name) != (engines, roles):
            self._named[name] = engines, roles
            self._follow_names()

    def _follow_names(self) -> None:
        """Connect to the engines that are named, and to no others."""
        named = {address: roles for engines, roles in self._named.values() for address in engines}
        for address in [address for address in self._found if address not in named]:
            closing = asyncio.ensure_future(self._found.pop(address).client.close())
            self._ending.add(closing)
            closing.add_done_callback(self._ending.discard)
        for address, roles in named.items():
            if address not in self._found:
                self._found[address] = _Found(self._client(address), roles)
        self._decide()

    def _client(self, address: str) -> EngineClient:
        return EngineClient(
            f"tcp://{address}",
            on_deltas=lambda deltas: None,
            on_lost=lambda failure: self._decide(),
            get_vocabulary=None,
            on_cancel=lambda request_ids: None,
            on_ready=lambda engine: self._decide(),
            secret=self._secret,
        )

    # --- Which of them are used -------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Use the engines that fit each other, and announce them where they have changed."""
        if self._closed.is_set():
            return
        found = self._found.values()
        current = (one.client.engine for one in found if one.instance and _is_there(one))
        reference = self._own or next(current, None)
        for one in found:
            engine = one.client.engine
            if engine is None:
                if one.instance and reference and not self._fits(one.instance, reference):
                    one.instance = None
                continue
            objection = self._objection(one, engine, reference)
            if objection and objection != one.objection:
                logger.warning("the instance at %s is not used: %s", one.client.name, objection)
            one.objection = objection
            if objection:
                one.instance = None
                continue
            reference = reference or engine
            instance = Instance(one.client.name, engine.role, engine.fingerprint, engine.weights_version)
            if one.instance != instance:
                one.instance = instance
                logger.info("the %s instance at %s has joined", engine.role, one.client.name)
            if engine.role != "prefill" and not self._ready.done():
                self._ready.set_result(engine)
        announced = tuple(one.instance for one in found if one.instance)
        if announced != self._announced:
            self._announced = announced
            self._on_change(announced)

    def _objection(self, one: _Found, engine: Ready, reference: Ready | None) -> str:
        """Why an engine cannot be used; empty where it can."""
        if engine.role not in one.expected:
            return f"it is a {engine.role} instance, and is named as a {' or '.join(one.expected)} instance"
        if self._tokenizer and engine.tokenizer_version and self._tokenizer != engine.tokenizer_version:
            return "it has another tokenizer than the model of this router: give both the same --model"
        if reference is None or reference is engine:
            return ""
        if engine.weights_version != reference.weights_version:
            return (
                f"it has the weights {engine.weights_version[:16]}, and the others have "
                f"{reference.weights_version[:16]}: give all the same checkpoint"
            )
        if engine.fingerprint != reference.fingerprint and not self._allow_mismatch:
            return (
                f"its results have other bits: its kernels are {engine.fingerprint}, and those of the others "
                f"{reference.fingerprint} (--allow-fingerprint-mismatch uses it nevertheless)"
            )
        return ""

    def _fits(self, instance: Instance, reference: Ready) -> bool:
        return instance.weights_version == reference.weights_version and (
            self._allow_mismatch or instance.fingerprint == reference.fingerprint
        )


def _is_there(one: _Found) -> bool:
    """Whether an engine that is used is connected, and still what it was."""
    return one.client.engine is not None and one.instance is not None and one.instance.matches(one.client.engine)
