"""The database: SQLite in a folder, or any that SQLAlchemy reaches."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, MetaData, create_engine, event
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

T = TypeVar("T")
METADATA = MetaData()
"""Its tables, which the other modules of this package define."""
LOCK_TIMEOUT = 10.0
"""Seconds that a process waits while another one writes to SQLite."""
FILE = "penstock.db"


class Database:
    """Runs transactions in threads. All API processes use the same database; each opens it for itself.

    Args:
        options: ``storage_url``, or ``storage_dir`` with a file of SQLite.

    Raises ``PenstockError`` (``invalid``) where it cannot be opened.
    """

    def __init__(self, options: ServerOptions) -> None:
        field = "storage_url" if options.storage_url else "storage_dir"
        try:
            self._engine = _open(options)
            try:
                METADATA.create_all(self._engine)
            except SQLAlchemyError:  # another process has made some of them meanwhile
                METADATA.create_all(self._engine)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise invalid(field, f"{error}; it is a URL of SQLAlchemy's, such as postgresql+psycopg://…") from error
        except (SQLAlchemyError, OSError) as error:
            raise invalid(field, f"the database cannot be opened: {_reason(error)}") from error

    async def run(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function in a transaction, which an exception rolls back. Raises ``PenstockError`` (``unavailable``)
        where the database does not answer."""
        try:
            return await asyncio.to_thread(self._run, transaction)
        except SQLAlchemyError as error:
            words = f"the server's database does not answer: {_reason(error)}"
            raise PenstockError(Code.UNAVAILABLE, words) from error

    def _run(self, transaction: Callable[[Connection], T]) -> T:
        with self._engine.begin() as connection:
            return transaction(connection)

    def close(self) -> None:
        self._engine.dispose()


def owner_of(key: str) -> str:
    """The owner of what a request has the server keep: a digest of its API key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _open(options: ServerOptions) -> Engine:
    if options.storage_url:
        return create_engine(options.storage_url, pool_pre_ping=True)
    folder = Path(options.storage_dir).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{folder / FILE}", connect_args={"timeout": LOCK_TIMEOUT})
    event.listen(engine, "connect", _tune_sqlite)
    return engine


def _tune_sqlite(connection: object, _: object) -> None:
    """Readers do not wait for a writer; what was committed survives the process, and all but the last moments the
    machine."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]
