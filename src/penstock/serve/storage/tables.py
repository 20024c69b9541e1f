"""Database tables. Times are in seconds since 1970, sizes in bytes."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table

METADATA = MetaData()
RESPONSES = Table(
    "responses",
    METADATA,
    Column("id", String(160), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("previous", String(160), nullable=False),
    Column("expires", Float, nullable=False),
    Column("beat", Float, nullable=False),
    Column("status", String(16), nullable=False),
    Column("document", JSON, nullable=False),
    Column("input", JSON, nullable=False),
    Column("size", BigInteger, nullable=False, server_default="0"),
    Column("worker", String(64)),
    Column("deaths", Integer, nullable=False, server_default="0"),
    Column("request", JSON(none_as_null=True)),
    Index("responses_expires", "expires"),
    Index("responses_use", "owner", "expires", "size"),
    Index("responses_worker", "worker"),
)
"""``document`` is the response object; its status is also in ``status``. ``input`` has the items of the request
without the items of previous responses; ``size`` is the total size of ``document``, ``input``, ``request`` and events.

A background response that is not finished has a lease: ``worker`` is the id of the API process that computes it (empty:
none), and ``beat`` a number that this process increments. ``deaths`` is the number of earlier processes that have ended
without finishing it, and ``request`` the request with all its items. Otherwise ``worker`` and ``request`` are null."""
RESPONSE_EVENTS = Table(
    "response_events",
    METADATA,
    Column("response", String(160), primary_key=True),
    Column("last", Integer, primary_key=True, autoincrement=False),
    Column("expires", Float, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("response_events_expires", "expires"),
)
"""Consecutive events of a streamed background response up to the sequence number ``last``, compressed."""
CONVERSATIONS = Table(
    "conversations",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("size", BigInteger, nullable=False),
    Index("conversations_use", "owner", "expires", "size"),
)
"""``size`` is the total size of the conversation's items."""
CONVERSATION_ITEMS = Table(
    "conversation_items",
    METADATA,
    Column("position", Integer, primary_key=True, autoincrement=True),
    Column("conversation", String(64), nullable=False),
    Column("id", String(160), nullable=False),
    Column("document", JSON, nullable=False),
    Column("size", BigInteger, nullable=False),
    Index("conversation_items_of", "conversation", "id"),
    Index("conversation_items_order", "conversation", "position"),
)
FILES = Table(
    "files",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("name", String(1024), nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Index("files_use", "owner", "expires", "size"),
    Index("files_order", "owner", "created", "id"),
)
BATCHES = Table(
    "batches",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("status", String(16), nullable=False),
    Column("document", JSON, nullable=False),
    Index("batches_order", "owner", "created", "id"),
)
"""``document`` is the batch object without its status."""
SECRETS = Table("secrets", METADATA, Column("name", String(64), primary_key=True), Column("value", String(64)))
"""Random values shared by all servers of this database."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that are not finished."""
