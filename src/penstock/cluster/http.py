"""Requests of a router and its instances to each other's servers."""

from __future__ import annotations

import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core import Code, PenstockError

from .signature import HEADER, sign

INSTANCE_PATH = "/penstock/instance"
"""GET at an instance: ``InstanceInfo``."""
REGISTER_PATH = "/penstock/register"
"""POST at a router: ``RegisterRequest``."""
TIMEOUT = 5.0
"""Seconds of a request."""


class EngineInfo(msgspec.Struct, frozen=True):
    """An engine of an instance."""

    address: str
    """Where routers reach it, as host:port; the host may be one that means all of the instance's addresses."""
    role: str


class InstanceInfo(msgspec.Struct, frozen=True):
    """What an instance tells of itself."""

    version: str
    """Of Penstock."""
    engines: tuple[EngineInfo, ...]
    """Those that routers reach; none before they have loaded the model."""


class RegisterRequest(msgspec.Struct, frozen=True):
    """An instance says to a router that it is there, or that it leaves."""

    name: str
    """Drawn when the instance starts."""
    engines: tuple[EngineInfo, ...]
    leaves: bool = False


def call(base: str, path: str, secret: bytes, body: bytes | None = None) -> Any:
    """The JSON document that a server answers; blocks for at most ``TIMEOUT``.

    Args:
        base: ``http://host:port`` or ``https://host:port`` (without checking the certificate: both ends are known by
            the secret), or without the scheme of HTTP.
        body: of a POST; None is a GET.

    Raises ``OSError`` where it cannot be reached, ``PenstockError`` (``unavailable``) where it answers anything else.
    """
    url = urlsplit(base if "://" in base else f"http://{base}")
    host, port = url.hostname or "", url.port
    secure: dict[str, Any] = {"context": ssl._create_unverified_context()} if url.scheme == "https" else {}
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=TIMEOUT, **secure)
    try:
        headers = {HEADER: sign(secret, path, body or b""), "content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read(2**20)
    except http.client.HTTPException as error:
        raise PenstockError(Code.UNAVAILABLE, f"{base} does not answer in HTTP ({error!r})") from error
    finally:
        connection.close()
    try:
        document = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        document = None
    if response.status != 200 or document is None:
        reason = document.get("message") if isinstance(document, dict) else None
        raise PenstockError(
            Code.UNAVAILABLE, f"{base} answers {response.status}: {reason or 'it is no server of Penstock'}"
        )
    return document
