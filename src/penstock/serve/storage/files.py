"""Files that clients have uploaded, or that batches have written: contents in a folder, the rest in the database."""

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
from .tables import FILES
from .usage import Quotas

ORPHAN_AGE = 2 * 86_400.0
"""Seconds after which contents without a file are removed; a batch has ended before."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file, as OpenAI's API describes it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: None = None


class FileStore:
    """Keeps files, each for the owner that made it.

    Args:
        folder: for their contents; made if it is not there.
        retention: seconds that a file is kept.
        max_size: bytes of the largest file.
    """

    def __init__(self, database: Database, folder: Path, retention: float, max_size: int, quotas: Quotas) -> None:
        self._database = database
        self.folder = folder
        self._retention = retention
        self._max_size = max_size
        self._quotas = quotas
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where the contents of a file are."""
        return self.folder / name

    async def add(
        self, owner: str, filename: str, purpose: str, size: int, pieces: AsyncIterator[bytes], lifetime: float | None
    ) -> StoredFile:
        """Keep a file.

        Args:
            size: bytes that it is going to have.
            lifetime: seconds that it is kept, ``retention`` at most; None for that.

        Raises ``PenstockError``: as ``Quotas.check``; ``too_large``; ``unavailable`` where the disk is full.
        """
        await self._database.read(lambda connection: self._check(connection, owner, size))
        name = f"file-{uuid4().hex}"
        partial, size = self.folder / f"{name}.partial", 0
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                async for piece in pieces:
                    size += len(piece)
                    if size > self._max_size:
                        words = f"file: must have at most {self._max_size} bytes"
                        raise PenstockError(Code.TOO_LARGE, words, "file", self._max_size)
                    await asyncio.to_thread(file.write, piece)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            partial.rename(self.path(name))
        except OSError as error:
            words = f"the file cannot be stored: {(error.strerror or str(error)).lower()}"
            raise PenstockError(Code.UNAVAILABLE, words) from error
        finally:
            partial.unlink(missing_ok=True)
        try:
            return await self._register(owner, name, filename, purpose, size, lifetime, checked=True)
        except PenstockError:
            self.path(name).unlink(missing_ok=True)
            raise

    async def register(
        self, owner: str, name: str, filename: str, purpose: str, size: int, lifetime: float | None
    ) -> StoredFile:
        """Keep a file whose contents are there already, be there room for it or not: it has been computed.

        Args:
            lifetime: as for ``add``.
        """
        return await self._register(owner, name, filename, purpose, size, lifetime, checked=False)

    async def _register(
        self, owner: str, name: str, filename: str, purpose: str, size: int, lifetime: float | None, checked: bool
    ) -> StoredFile:
        now = time.time()
        expires = now + min(self._retention, lifetime or self._retention)
        values = {"id": name, "owner": owner, "created": now, "expires": expires}

        def transaction(connection: Connection) -> None:
            if checked:
                self._check(connection, owner, size)
            connection.execute(delete(FILES).where(FILES.c.id == name))  # of a process that was killed afterwards
            connection.execute(insert(FILES).values(**values, name=filename[:1024], purpose=purpose[:64], size=size))

        await self._database.write(transaction)
        return StoredFile(name, size, int(now), filename, purpose, int(expires))

    async def get(self, owner: str, name: str, field: str = "file_id") -> StoredFile:
        """A file. Raises ``PenstockError`` (``not_found``) where the owner has none of this id."""
        row = await self._database.read(lambda connection: _row(connection, owner, name))
        if row is None or not self.path(row.id).is_file():
            raise PenstockError(Code.NOT_FOUND, f"{field}: there is no file {name[:80]!r}", field)
        return _described(row)

    async def page(self, owner: str, query: PageQuery, purpose: str | None = None) -> Page:
        """A page of the owner's files."""

        def transaction(connection: Connection) -> Page:
            where = [FILES.c.owner == owner, FILES.c.expires >= time.time()]
            if purpose is not None:
                where.append(FILES.c.purpose == purpose)
            entries, key = select(FILES).where(*where), (FILES.c.created, FILES.c.id)
            found = newest_first(connection, entries, key, FILES.c.id, query)
            return found._replace(entries=[msgspec.to_builtins(_described(row)) for row in found.entries])

        return await self._database.read(transaction)

    async def delete(self, owner: str, name: str) -> None:
        """Raises as ``get``."""
        await self.get(owner, name)
        await self._database.write(lambda connection: connection.execute(delete(FILES).where(FILES.c.id == name)))
        self.path(name).unlink(missing_ok=True)

    async def sweep(self) -> None:
        """Remove contents that belong to no file, as a process was killed: those that are older than a day."""
        names = await self._database.read(lambda connection: set(connection.execute(select(FILES.c.id)).scalars()))

        def remove() -> None:
            for path in self.folder.iterdir():
                if path.name not in names and time.time() - path.stat().st_mtime > ORPHAN_AGE:
                    path.unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    def _check(self, connection: Connection, owner: str, size: int) -> None:
        self._quotas.check(connection, owner, "file", files=1, bytes=size)

    async def remove_expired(self) -> None:
        """With their contents."""

        def transaction(connection: Connection) -> list[str]:
            old = FILES.c.expires < time.time()
            names = list(connection.execute(select(FILES.c.id).where(old)).scalars())
            connection.execute(delete(FILES).where(old))
            return names

        for name in await self._database.write(transaction):
            self.path(name).unlink(missing_ok=True)


def _row(connection: Connection, owner: str, name: str) -> Row[Any] | None:
    where = (FILES.c.id == name, FILES.c.owner == owner, FILES.c.expires >= time.time())
    return connection.execute(select(FILES).where(*where)).first()


def _described(row: Row[Any]) -> StoredFile:
    return StoredFile(row.id, row.size, int(row.created), row.name, row.purpose, int(row.expires))
