"""An instance's registration with its routers: it says that it is there, again and again, and that it leaves."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

import msgspec

from penstock.cluster.http import REGISTER_PATH, EngineInfo, RegisterRequest, call
from penstock.core import PenstockError
from penstock.engine.service.messages import Ready

logger = logging.getLogger("penstock")

INTERVAL = 2.0
"""Seconds between two registrations."""
LEAVE_TIMEOUT = 3.0
"""Seconds that a router has to hear that the instance leaves."""


async def stay_registered(routers: Sequence[str], secret: bytes, reports: Callable[[], list[Ready]]) -> None:
    """Register the engines of this host with routers until cancelled; then say that this instance leaves, so that they
    send it no more requests.

    Args:
        routers: the option ``router_address``.
        secret: of the cluster.
        reports: returns the reports of the engines that run.
    """
    name = secrets.token_hex(8)

    async def say(router: str, leaves: bool) -> None:
        engines = tuple(EngineInfo(each.engine_address, each.role) for each in reports() if each.engine_address)
        body = msgspec.json.encode(RegisterRequest(name, engines, leaves))
        await asyncio.to_thread(call, router, REGISTER_PATH, secret, body)

    async def register(router: str) -> None:
        told = "never"
        while True:
            problem = ""
            try:
                await say(router, leaves=False)
            except (OSError, ValueError, PenstockError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            if problem != told:
                told = problem
                if problem:
                    logger.warning("cannot register with the router at %s yet: %s", router, problem)
                else:
                    logger.info("registered with the router at %s", router)
            await asyncio.sleep(INTERVAL)

    try:
        await asyncio.gather(*map(register, routers), return_exceptions=True)
    finally:
        leaving = asyncio.gather(*(say(router, leaves=True) for router in routers), return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await leaving
        except TimeoutError:
            logger.warning("a router does not answer; it will notice that this instance has left")
