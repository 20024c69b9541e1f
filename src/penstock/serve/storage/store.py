"""Base class of stores, and decorators for methods that are transactions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from .database import Database
from .usage import Quotas

S = TypeVar("S", bound="Store")
T = TypeVar("T")
P = ParamSpec("P")
Transaction = Callable[Concatenate[S, Connection, P], T]
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


class Store:
    """Base class of a store of rows that have an owner.

    Args:
        retention: seconds until a row expires.
    """

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        self._database = database
        self._retention = retention
        self._quotas = quotas


def reads(transaction: Transaction[S, P, T]) -> Method[S, P, T]:
    """Turn a function of a connection into a method that runs it with ``Database.read``."""

    @wraps(transaction)
    async def method(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._database.read(lambda connection: transaction(self, connection, *args, **named))

    return method


def writes(transaction: Transaction[S, P, T]) -> Method[S, P, T]:
    """Turn a function of a connection into a method that runs it with ``Database.write``."""

    @wraps(transaction)
    async def method(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._database.write(lambda connection: transaction(self, connection, *args, **named))

    return method
