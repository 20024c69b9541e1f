"""Files uploaded by clients or written by batches: contents in a folder, metadata in the database."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from sqlalchemy import Connection, Row, delete, insert, select

from penstock.core import Code, PenstockError

from .database import PRIVATE, Database, newest_first
from .pages import Page, PageQuery
from .store import Store, reads, writes
from .tables import FILES
from .usage import Quotas

ORPHAN_AGE = 2 * 86_400.0
"""Seconds after which contents without a database row are removed; longer than a batch may run."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file object of OpenAI's API."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: None = None


class FileStore(Store):
    """Stores files: contents in a folder, metadata in the database.

    Args:
        folder: folder of the contents; created if missing.
        max_size: maximum size of a file in bytes.
    """

    def __init__(self, database: Database, folder: Path, retention: float, max_size: int, quotas: Quotas) -> None:
        super().__init__(database, retention, quotas)
        self.folder = folder
        self._max_size = max_size
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Path of a file's contents."""
        return self.folder / name

    async def add(
        self, owner: str, filename: str, purpose: str, size: int, chunks: AsyncIterator[bytes], lifetime: float | None
    ) -> StoredFile:
        """Store a file.

        Args:
            size: expected size in bytes.
            lifetime: seconds until the file expires, at most ``retention``; None: ``retention``.

        Raises ``PenstockError``: as ``Quotas.check``; ``too_large``; ``unavailable`` if the file cannot be written.
        """
        await self._check_room(owner, size)
        name = f"file-{uuid4().hex}"
        partial, size = self.folder / f"{name}.partial", 0
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self._max_size:
                        message = f"file: must have at most {self._max_size} bytes"
                        raise PenstockError(Code.TOO_LARGE, message, "file", self._max_size)
                    await asyncio.to_thread(file.write, chunk)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            partial.rename(self.path(name))
        except OSError as error:
            message = f"the file cannot be stored: {(error.strerror or str(error)).lower()}"
            raise PenstockError(Code.UNAVAILABLE, message) from error
        finally:
            partial.unlink(missing_ok=True)
        try:
            return await self.register(owner, name, filename, purpose, size, lifetime, checked=True)
        except PenstockError:
            self.path(name).unlink(missing_ok=True)
            raise

    @writes
    def register(
        self,
        connection: Connection,
        owner: str,
        name: str,
        filename: str,
        purpose: str,
        size: int,
        lifetime: float | None,
        checked: bool = False,
    ) -> StoredFile:
        """Store the metadata of a file with already written contents.

        Args:
            lifetime: see ``add``.
            checked: check the quotas; files written by batches are always stored.
        """
        if checked:
            self._check(connection, owner, size)
        now = time.time()
        expires = now + min(self._retention, lifetime or self._retention)
        values = {"id": name, "owner": owner, "created": now, "expires": expires}
        connection.execute(delete(FILES).where(FILES.c.id == name))  # a killed process may have left a row
        connection.execute(insert(FILES).values(**values, name=filename[:1024], purpose=purpose[:64], size=size))
        return StoredFile(name, size, int(now), filename, purpose, int(expires))

    @reads
    def get(self, connection: Connection, owner: str, name: str, field: str = "file_id") -> StoredFile:
        """Return a file. Raises ``PenstockError`` (``not_found``) if the owner has no file with this id."""
        where = (FILES.c.id == name, FILES.c.owner == owner, FILES.c.expires >= time.time())
        row = connection.execute(select(FILES).where(*where)).first()
        if row is None or not self.path(row.id).is_file():
            raise PenstockError(Code.NOT_FOUND, f"{field}: the file {name[:80]!r} does not exist or has expired", field)
        return _described(row)

    @reads
    def page(self, connection: Connection, owner: str, query: PageQuery, purpose: str | None = None) -> Page:
        """Return a page of the owner's files."""
        where = [FILES.c.owner == owner, FILES.c.expires >= time.time()]
        if purpose is not None:
            where.append(FILES.c.purpose == purpose)
        entries, key = select(FILES).where(*where), (FILES.c.created, FILES.c.id)
        found = newest_first(connection, entries, key, FILES.c.id, query)
        return found._replace(entries=[msgspec.to_builtins(_described(row)) for row in found.entries])

    async def delete(self, owner: str, name: str) -> None:
        """Delete a file. Raises as ``get``."""
        await self.get(owner, name)
        await self._database.write(lambda connection: connection.execute(delete(FILES).where(FILES.c.id == name)))
        self.path(name).unlink(missing_ok=True)

    async def sweep(self) -> None:
        """Remove contents without a database row, left by killed processes, that are older than ``ORPHAN_AGE``."""
        names = await self._database.read(lambda connection: set(connection.execute(select(FILES.c.id)).scalars()))

        def remove() -> None:
            for path in self.folder.iterdir():
                if path.name not in names and time.time() - path.stat().st_mtime > ORPHAN_AGE:
                    path.unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    def _check(self, connection: Connection, owner: str, size: int) -> None:
        self._quotas.check(connection, owner, "file", files=1, bytes=size)

    _check_room = reads(_check)

    async def remove_expired(self) -> None:
        """Remove expired files with their contents."""
        for name in await self._delete_expired():
            self.path(name).unlink(missing_ok=True)

    @writes
    def _delete_expired(self, connection: Connection) -> list[str]:
        old = FILES.c.expires < time.time()
        names = list(connection.execute(select(FILES.c.id).where(old)).scalars())
        connection.execute(delete(FILES).where(old))
        return names


def _described(row: Row[Any]) -> StoredFile:
    return StoredFile(row.id, row.size, int(row.created), row.name, row.purpose, int(row.expires))
