"""The database: an SQLite file, or any database supported by SQLAlchemy."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    create_engine,
    delete,
    event,
    func,
    inspect,
    literal,
    select,
    text,
    tuple_,
)
from sqlalchemy.exc import ArgumentError, DataError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from penstock.config.options import ServerOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .pages import Page, PageQuery
from .tables import METADATA, SECRETS

T = TypeVar("T")
LOCK_TIMEOUT = 10.0
"""Seconds that a process waits for another process's write transaction in SQLite."""
NUM_READERS = 4
"""Maximum number of concurrent read transactions per process."""
NUM_WRITERS = 4
"""Maximum number of concurrent write transactions per process; with SQLite one in all processes together."""
SCHEMA_LOCK, QUOTA_LOCK = 0x70656E73746F636B, 0x70656E73746F636C
"""Numbers of PostgreSQL advisory locks for creating tables and for checking quotas; unlikely to be used by other
applications."""
DELETED_AT_ONCE = 100
"""Rows per transaction of ``delete_in_parts``."""
READ_ONLY = {"postgresql_readonly": True}
"""Execution options of read transactions; also read by ``_begin_sqlite``."""
FILE = "penstock.db"
PRIVATE = 0o600


class Database:
    """Runs transactions in threads. Every API process opens the same database.

    Args:
        options: ``storage_url``, or ``storage_dir`` for an SQLite file.

    Raises ``PenstockError`` (``invalid``) if the database cannot be opened.
    """

    def __init__(self, options: ServerOptions) -> None:
        field = "storage_url" if options.storage_url else "storage_dir"
        try:
            self._engine = _open(options)
            with self._engine.begin() as connection:
                lock(connection, SCHEMA_LOCK)  # creating the same table concurrently may fail
                for table in METADATA.sorted_tables:
                    connection.execute(CreateTable(table, if_not_exists=True))
                    _add_new_columns(connection, table)
                    for index in table.indexes:
                        connection.execute(CreateIndex(index, if_not_exists=True))
                self.secret = _shared_secret(connection)
                """Random bytes shared by all servers that use this database."""
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise invalid(field, f"{error}; a URL of SQLAlchemy is required, such as postgresql+psycopg://…") from error
        except (SQLAlchemyError, OSError) as error:
            raise invalid(field, f"the database cannot be opened: {_reason(error)}") from error
        self._readers = ThreadPoolExecutor(NUM_READERS, "database-read")
        writers = 1 if self._engine.dialect.name == "sqlite" else NUM_WRITERS
        self._writers = ThreadPoolExecutor(writers, "database-write")

    async def read(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function in a read-only transaction, which sees a snapshot of the database (SQLite) and does not wait
        for writers. Raises as ``write``."""
        return await self._run(self._readers, transaction, READ_ONLY)

    async def write(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function in a transaction, which is rolled back by an exception. In SQLite, write transactions run one
        after the other.

        Raises ``PenstockError``: ``invalid`` for values that the database rejects (a zero byte in PostgreSQL);
        ``unavailable`` if the database does not answer.
        """
        return await self._run(self._writers, transaction, {})

    async def delete_in_parts(self, table: Table, *where: ColumnElement[bool]) -> None:
        """Delete rows, ``DELETED_AT_ONCE`` per transaction, so that other writers are not blocked."""
        key = table.primary_key.columns.values()[0]

        names = await self.read(lambda connection: list(connection.execute(select(key).where(*where)).scalars()))
        for first in range(0, len(names), DELETED_AT_ONCE):
            part = delete(table).where(key.in_(names[first : first + DELETED_AT_ONCE]), *where)
            await self.write(partial(Connection.execute, statement=part))

    async def _run(
        self, threads: ThreadPoolExecutor, transaction: Callable[[Connection], T], options: dict[str, Any]
    ) -> T:
        def run() -> T:
            with self._engine.connect() as connection, connection.execution_options(**options).begin():
                return transaction(connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(threads, run)
        except DataError as error:
            raise PenstockError(Code.INVALID, f"the server's database rejects a value: {_reason(error)}") from error
        except SQLAlchemyError as error:
            message = f"the server's database does not answer: {_reason(error)}"
            raise PenstockError(Code.UNAVAILABLE, message) from error


def lock(connection: Connection, number: int) -> None:
    """Hold a PostgreSQL advisory lock until the end of the transaction. SQLite runs one write transaction at a time
    anyway; in other databases nothing is locked."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(number)))


def _shared_secret(connection: Connection) -> bytes:
    """Return the random secret of the database, which is created by the first server."""
    name, value = SECRETS.c.name, SECRETS.c.value
    missing = ~select(name).where(name == "names").exists()
    created = select(literal("names"), literal(secrets.token_hex(32))).where(missing)
    connection.execute(SECRETS.insert().from_select([name, value], created))
    return bytes.fromhex(str(connection.execute(select(value).where(name == "names")).scalar_one()))


def _add_new_columns(connection: Connection, table: Table) -> None:
    """Add columns that are missing in a table of an earlier version, with their default value."""
    existing = {column["name"] for column in inspect(connection).get_columns(table.name)}
    for column in table.columns:
        if column.name not in existing:
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


JSON_CODEC: dict[str, Any] = {"json_serializer": _encode, "json_deserializer": msgspec.json.decode}


def _open(options: ServerOptions) -> Engine:
    if options.storage_url:
        engine = create_engine(options.storage_url, pool_pre_ping=True, **JSON_CODEC)
    else:
        folder = Path(options.storage_dir).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / FILE).touch(mode=PRIVATE)
        engine = create_engine(f"sqlite:///{folder / FILE}", connect_args={"timeout": LOCK_TIMEOUT}, **JSON_CODEC)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _tune_sqlite(connection: object, _: object) -> None:
    """Use the WAL: committed data survives a crash of the process; a crash of the machine may lose the last
    transactions. ``_begin_sqlite`` begins transactions, as ``sqlite3`` begins none before the first write."""
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError:  # another process is changing the mode; SQLite does not wait
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    reads = connection.get_execution_options().get("postgresql_readonly", False)
    connection.exec_driver_sql(f"PRAGMA query_only = {reads:d}")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def newest_first(
    connection: Connection,
    entries: Select[Any],
    key: tuple[ColumnElement[Any], ...],
    id_column: ColumnElement[Any],
    query: PageQuery,
) -> Page:
    """Read a page of rows.

    Args:
        entries: query of all rows, in any order.
        key: columns to sort by; the oldest row has the smallest key.
        id_column: column compared with ``PageQuery.after``.
    """
    if query.after:
        at = connection.execute(entries.with_only_columns(*key).where(id_column == query.after)).first()
        if at is None:
            return Page([], False)
        after = tuple_(*at)
        entries = entries.where(tuple_(*key) > after if query.ascending else tuple_(*key) < after)
    order = key if query.ascending else [column.desc() for column in key]
    rows = list(connection.execute(entries.order_by(*order).limit(query.limit + 1)))
    return Page(rows[: query.limit], len(rows) > query.limit)


def too_large(field: str, size: int, maximum: int) -> PenstockError:
    """The error for a request that has ``size`` bytes including the stored items that it references."""
    message = f"the request has {size} bytes including its stored items; the limit is {maximum} (max_body_size)"
    return PenstockError(Code.TOO_LARGE, f"{field}: {message}; reference fewer items", field, maximum, size)
