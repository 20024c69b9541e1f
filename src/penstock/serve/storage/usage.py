"""Storage usage and quotas."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client.core import GaugeMetricFamily, Metric
from sqlalchemy import ColumnElement, Connection, Table, func, select

from penstock.config.storage_limits import StorageLimits
from penstock.core import Code, PenstockError

from .database import QUOTA_LOCK, Database, lock
from .tables import BATCHES, CONVERSATIONS, FILES, OPEN, RESPONSES

SIZED = {"files": FILES, "responses": RESPONSES, "conversations": CONVERSATIONS}
"""Tables with a column ``size``, by name of their limit."""
DESCRIPTIONS = {
    "bytes": "Bytes of stored files, responses and conversations.",
    "files": "Stored files.",
    "responses": "Stored responses.",
    "conversations": "Stored conversations.",
    "batches": "Batches that are not finished.",
}
MAX_AGE = 5.0
"""Seconds for which the metrics are cached."""


@dataclass(frozen=True)
class Quotas:
    """Storage limits, per owner and in total."""

    each: StorageLimits
    """Limits of each owner."""
    total: StorageLimits
    """Limits of all owners together."""
    refused: Callable[[str], None]
    """Called with the name of an exceeded limit."""

    def check(self, connection: Connection, owner: str, field: str, **more: int) -> None:
        """Check that the limits allow the additional amounts.

        Args:
            field: field of the request, for the error.
            more: additional amounts, by names of ``StorageLimits``.

        Raises ``PenstockError``: ``overloaded`` for batches, as running batches end; otherwise ``invalid``, as in
        OpenAI's API, because a retry does not help.
        """
        if any(getattr(limits, name) is not None for limits in (self.each, self.total) for name in more):
            lock(connection, QUOTA_LOCK)
        for limits, scope, option in (
            (self.each, owner, "storage_quota of each API key"),
            (self.total, None, "storage_limit of the server"),
        ):
            for name, count in more.items():
                limit: int | None = getattr(limits, name)
                if limit is None or (used := _used(connection, name, scope)) + count <= limit:
                    continue
                self.refused(name)
                state = f"the {option} is {limit} {name}, of which {used} are used"
                if name == "batches":
                    raise PenstockError(Code.OVERLOADED, f"{field}: {state}; wait until a batch ends", field, limit)
                message = f"{field}: {state}, and {count} more do not fit; delete objects, or wait until they expire"
                raise PenstockError(Code.INVALID, message, field, limit, used + count)


class Usage:
    """Storage metrics per tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cached = (0.0, list[Metric]())

    def public_name(self, owner: str) -> str:
        """Name of an owner in the metrics."""
        return public_name(self._database.secret, owner)

    async def metrics(self) -> list[Metric]:
        """Return the metrics. Raises ``PenstockError`` (``unavailable``) if the database does not answer."""
        if time.monotonic() - self._cached[0] > MAX_AGE or not self._cached[1]:
            self._cached = time.monotonic(), await self._database.read(partial(_count, self._database.secret))
        return self._cached[1]


def _used(connection: Connection, name: str, owner: str | None) -> int:
    """Usage of an owner; None: of all owners together."""
    if name == "batches":
        where = [BATCHES.c.status.in_(OPEN), *([] if owner is None else [BATCHES.c.owner == owner])]
        return int(connection.execute(select(func.count()).select_from(BATCHES).where(*where)).scalar_one())
    if name == "bytes":
        return sum(_total(connection, table, func.sum(table.c.size), owner) for table in SIZED.values())
    return _total(connection, SIZED[name], func.count(), owner)


def _total(connection: Connection, table: Table, aggregate: ColumnElement[int], owner: str | None) -> int:
    where = [table.c.expires >= time.time(), *([] if owner is None else [table.c.owner == owner])]
    return int(connection.execute(select(aggregate).select_from(table).where(*where)).scalar() or 0)


def public_name(secret: bytes, owner: str) -> str:
    """Name of an owner in the metrics, which are public.

    Owners are hashes of API keys, from which short keys can be guessed. This name reveals nothing about the key without
    the secret, and is the same in all processes and servers of a database, and after a restart.
    """
    return hmac.new(secret, owner.encode(), "sha256").hexdigest()[:16] if owner else ""


def _count(secret: bytes, connection: Connection) -> list[Metric]:
    counts: dict[str, dict[str, int]] = {name: {} for name in DESCRIPTIONS}
    for name, table in SIZED.items():
        totals = select(table.c.owner, func.count(), func.sum(table.c.size)).where(table.c.expires >= time.time())
        for owner, number, size in connection.execute(totals.group_by(table.c.owner)):
            counts[name][owner] = number
            counts["bytes"][owner] = counts["bytes"].get(owner, 0) + int(size)
    pending = select(BATCHES.c.owner, func.count()).where(BATCHES.c.status.in_(OPEN)).group_by(BATCHES.c.owner)
    counts["batches"] = {owner: number for owner, number in connection.execute(pending)}
    families = []
    for name, about in DESCRIPTIONS.items():
        families.append(family := GaugeMetricFamily(f"penstock:storage_{name}", about, labels=["tenant"]))
        for owner, value in counts[name].items():
            family.add_metric([public_name(secret, owner)], value)
    return families
