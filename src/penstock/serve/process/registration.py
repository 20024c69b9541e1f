"""Registration of an instance with its routers: periodic registration, and deregistration at shutdown."""

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
"""Maximum time for the deregistration in seconds."""


async def stay_registered(routers: Sequence[str], secret: bytes, reports: Callable[[], list[Ready]]) -> None:
    """Register the engines of this host with routers until cancelled; then deregister, so that the routers send no
    further requests.

    Args:
        routers: the option ``router_address``.
        secret: secret of the cluster.
        reports: returns the reports of the running engines.
    """
    name = secrets.token_hex(8)

    async def send(router: str, leaves: bool) -> None:
        engines = tuple(EngineInfo(each.engine_address, each.role) for each in reports() if each.engine_address)
        body = msgspec.json.encode(RegisterRequest(name, engines, leaves))
        await asyncio.to_thread(call, router, REGISTER_PATH, secret, body)

    async def register(router: str) -> None:
        last_problem = "never registered"
        while True:
            problem = ""
            try:
                await send(router, leaves=False)
            except (OSError, ValueError, PenstockError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            if problem != last_problem:
                last_problem = problem
                if problem:
                    logger.warning("cannot register with the router at %s yet: %s", router, problem)
                else:
                    logger.info("registered with the router at %s", router)
            await asyncio.sleep(INTERVAL)

    try:
        await asyncio.gather(*map(register, routers), return_exceptions=True)
    finally:
        leaving = asyncio.gather(*(send(router, leaves=True) for router in routers), return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await leaving
        except TimeoutError:
            logger.warning("a router did not answer the deregistration; it will detect that this instance is gone")
