"""How much is stored, and whether there is room for more."""

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
"""Tables whose rows have a size, by name of the limit."""
DESCRIPTIONS = {
    "bytes": "Bytes of files, responses and conversations that are stored.",
    "files": "Files that are stored.",
    "responses": "Responses that are stored.",
    "conversations": "Conversations that are stored.",
    "batches": "Batches that have not ended.",
}
MAX_AGE = 5.0
"""Seconds for which what was counted for metrics is told again."""


@dataclass(frozen=True)
class Quotas:
    """Limits of what may be stored."""

    each: StorageLimits
    """Of each owner."""
    total: StorageLimits
    """Of all together."""
    refused: Callable[[str], None]
    """Called with the limit's name where one is exceeded."""

    def check(self, connection: Connection, owner: str, field: str, **more: int) -> None:
        """Check that there is room for more.

        Args:
            field: of the request, for the error.
            more: how much of what, by the names of ``StorageLimits``.

        Raises ``PenstockError``: ``overloaded`` for batches, as some will end; ``invalid`` otherwise, as in OpenAI's
        API: repeating the request does not help.
        """
        if any(getattr(limits, name) is not None for limits in (self.each, self.total) for name in more):
            lock(connection, QUOTA_LOCK)
        for limits, of, option in (
            (self.each, owner, "storage_quota of each API key"),
            (self.total, None, "storage_limit of the server"),
        ):
            for name, count in more.items():
                limit: int | None = getattr(limits, name)
                if limit is None or (used := _used(connection, name, of)) + count <= limit:
                    continue
                self.refused(name)
                state = f"the {option} is {limit} {name}, of which {used} are used"
                if name == "batches":
                    raise PenstockError(Code.OVERLOADED, f"{field}: {state}; wait until one has ended", field, limit)
                words = f"{field}: {state}, and {count} more do not fit; delete some, or wait until they expire"
                raise PenstockError(Code.INVALID, words, field, limit, used + count)


class Usage:
    """Metrics of what is stored, by tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counted = (0.0, list[Metric]())

    def public_name(self, owner: str) -> str:
        """Name of an owner in the metrics."""
        return public_name(self._database.secret, owner)

    async def metrics(self) -> list[Metric]:
        """Raises ``PenstockError`` (``unavailable``) where the database does not answer."""
        if time.monotonic() - self._counted[0] > MAX_AGE or not self._counted[1]:
            self._counted = time.monotonic(), await self._database.read(partial(_count, self._database.secret))
        return self._counted[1]


def _used(connection: Connection, name: str, owner: str | None) -> int:
    """How much of ``name`` an owner has; None is all together."""
    if name == "batches":
        where = [BATCHES.c.status.in_(OPEN), *([] if owner is None else [BATCHES.c.owner == owner])]
        return int(connection.execute(select(func.count()).select_from(BATCHES).where(*where)).scalar_one())
    if name == "bytes":
        return sum(_total(connection, table, func.sum(table.c.size), owner) for table in SIZED.values())
    return _total(connection, SIZED[name], func.count(), owner)


def _total(connection: Connection, table: Table, figure: ColumnElement[int], owner: str | None) -> int:
    where = [table.c.expires >= time.time(), *([] if owner is None else [table.c.owner == owner])]
    return int(connection.execute(select(figure).select_from(table).where(*where)).scalar() or 0)


def public_name(secret: bytes, owner: str) -> str:
    """Name of an owner in the metrics, which anybody may read.

    Owners are hashes of API keys, from which short keys can be guessed. Without the secret this name tells nothing of
    the key; it is the same in all processes and servers of a database, and after a restart.
    """
    return hmac.new(secret, owner.encode(), "sha256").hexdigest()[:16] if owner else ""


def _count(secret: bytes, connection: Connection) -> list[Metric]:
    counts: dict[str, dict[str, int]] = {name: {} for name in DESCRIPTIONS}
    for name, table in SIZED.items():
        figures = select(table.c.owner, func.count(), func.sum(table.c.size)).where(table.c.expires >= time.time())
        for owner, number, size in connection.execute(figures.group_by(table.c.owner)):
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
