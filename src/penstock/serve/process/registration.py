"""An instance's registration with its routers: it says that it is there, again and again, and that it leaves."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import msgspec

from penstock.cluster.http import REGISTER_PATH, EngineInfo, RegisterRequest, call
from penstock.config.options import Configuration
from penstock.core import PenstockError
from penstock.engine.executor.cluster_secret import read_secret
from penstock.engine.service.messages import Ready

logger = logging.getLogger("penstock")

INTERVAL = 2.0
"""Seconds between two registrations."""
LEAVE_TIMEOUT = 3.0
"""Seconds that a router has to hear that the instance leaves."""


class Registration:
    """Registers the engines of this host with the routers of ``router_address``.

    Args:
        reports: returns the reports of the engines that run.

    Raises ``PenstockError`` (``invalid``) where the cluster secret cannot be read.
    """

    def __init__(self, configuration: Configuration, reports: Callable[[], list[Ready]]) -> None:
        self._reports = reports
        self._routers = configuration.server.router_address
        self._secret = read_secret(configuration.engine.cluster_secret_file, make=True)
        self._name = secrets.token_hex(8)
        self._tasks = [asyncio.create_task(self._register(router)) for router in self._routers]

    async def close(self) -> None:
        """Tell the routers that this instance leaves, so that they send it no more requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        leaving = asyncio.gather(*(self._say(router, True) for router in self._routers), return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await leaving
        except TimeoutError:
            logger.warning("a router does not answer; it will notice that this instance has left")

    async def _register(self, router: str) -> None:
        told = "never"
        while True:
            problem = ""
            try:
                await self._say(router, False)
            except (OSError, PenstockError) as error:
                problem = str(error) if isinstance(error, PenstockError) else f"{error.strerror or error}"
            if problem != told:
                told = problem
                if problem:
                    logger.warning("cannot register with the router at %s yet: %s", router, problem)
                else:
                    logger.info("registered with the router at %s", router)
            await asyncio.sleep(INTERVAL)

    async def _say(self, router: str, leaves: bool) -> None:
        engines = tuple(EngineInfo(each.engine_address, each.role) for each in self._reports() if each.engine_address)
        body = msgspec.json.encode(RegisterRequest(self._name, engines, leaves))
        await asyncio.to_thread(call, router, REGISTER_PATH, self._secret, body)
