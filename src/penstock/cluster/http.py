"""HTTP requests between a router and its instances."""

from __future__ import annotations

import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core import Code, PenstockError

from .signature import HEADER, sign

INSTANCE_PATH = "/penstock/instance"
"""Path of an instance that returns ``InstanceInfo`` (GET)."""
REGISTER_PATH = "/penstock/register"
"""Path of a router that accepts ``RegisterRequest`` (POST)."""
TIMEOUT = 5.0
"""Timeout of a request in seconds."""


class EngineInfo(msgspec.Struct, frozen=True):
    """An engine of an instance."""

    address: str
    """Address for routers, host:port; the host may be the wildcard address (0.0.0.0)."""
    role: str


class InstanceInfo(msgspec.Struct, frozen=True):
    """Description of an instance."""

    version: str
    """Version of Penstock."""
    engines: tuple[EngineInfo, ...]
    """Engines that routers can connect to; empty until the model is loaded."""


class RegisterRequest(msgspec.Struct, frozen=True):
    """Request of an instance to register with a router, or to unregister."""

    name: str
    """Random name, generated when the instance starts."""
    engines: tuple[EngineInfo, ...]
    leaves: bool = False
    """True: unregister the instance; False: register it."""


def call(base: str, path: str, secret: bytes, body: bytes | None = None) -> Any:
    """Send a signed request and return the JSON document of the response. Blocks for at most ``TIMEOUT``.

    Args:
        base: ``host:port`` or ``http://host:port``, or ``https://host:port`` (the certificate is not verified, as the
            secret authenticates both sides).
        body: body of a POST request; None: GET.

    Raises ``OSError`` if the server cannot be reached, ``PenstockError`` (``unavailable``) for any other response.
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
        raise PenstockError(Code.UNAVAILABLE, f"{base} returned an invalid HTTP response ({error!r})") from error
    finally:
        connection.close()
    try:
        document = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        document = None
    if response.status != 200 or document is None:
        reason = document.get("message") if isinstance(document, dict) else None
        reason = reason or "it is not a Penstock server"
        raise PenstockError(Code.UNAVAILABLE, f"{base} returned status {response.status}: {reason}")
    return document
