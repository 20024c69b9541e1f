"""What stores have in common: transactions as methods, and the limits of what they keep."""

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
    """Keeps rows, each for the owner that made it.

    Args:
        retention: seconds that a row is kept.
    """

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        self._database = database
        self._retention = retention
        self._quotas = quotas


def reads(transaction: Transaction[S, P, T]) -> Method[S, P, T]:
    """A method that is a transaction of ``Database.read``, which gives it the connection."""

    @wraps(transaction)
    async def method(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._database.read(lambda connection: transaction(self, connection, *args, **named))

    return method


def writes(transaction: Transaction[S, P, T]) -> Method[S, P, T]:
    """A method that is a transaction of ``Database.write``, which gives it the connection."""

    @wraps(transaction)
    async def method(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._database.write(lambda connection: transaction(self, connection, *args, **named))

    return method
