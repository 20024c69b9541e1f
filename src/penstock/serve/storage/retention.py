"""Periodic removal of expired data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from penstock.core import PenstockError

INTERVAL = 60.0
"""Seconds between removals. Expired data is never returned, even before its removal."""
logger = logging.getLogger(__name__)


class Expiring(Protocol):
    async def remove_expired(self) -> None: ...


async def remove_expired(stores: Iterable[Expiring]) -> None:
    """Remove expired data from all stores, periodically until cancelled."""
    stores = tuple(stores)
    while True:
        for store in stores:
            try:
                await store.remove_expired()
            except PenstockError as error:
                logger.warning("expired data could not be removed, retrying later: %s", error)
        await asyncio.sleep(INTERVAL)
