"""Removes what has expired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from penstock.core import PenstockError

INTERVAL = 60.0
"""Seconds between two looks for what has expired. What has is not found any more in between."""
logger = logging.getLogger(__name__)


class Expiring(Protocol):
    async def remove_expired(self) -> None: ...


async def remove_expired(stores: Iterable[Expiring]) -> None:
    """Until cancelled: remove what has expired from all of them."""
    stores = tuple(stores)
    while True:
        for store in stores:
            try:
                await store.remove_expired()
            except PenstockError as error:
                logger.warning("what has expired is not removed yet: %s", error)
        await asyncio.sleep(INTERVAL)
