"""Access classes of routes, and checks of the headers Origin and Host."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from enum import Enum
from ipaddress import ip_address
from threading import Thread
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.core import Code, PenstockError

from .request_record import record_of

NO_CONTROL = "this changes the server for all API keys: use a key of --admin-api-key"
DOCKER_NAMES = ("host.docker.internal", "host.containers.internal")
"""Host names of this machine in Docker and Podman containers."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Access(Enum):
    """Access class of a route."""

    PUBLIC = "public"
    """Health, version, metrics, web page: no API key required."""
    SIGNED = "signed"
    """Requires the cluster's signature instead of an API key."""
    INFERENCE = "inference"
    """Computes, or describes models: web pages of other origins may call it as allowed by CORS."""
    PRIVATE = "private"
    """Reads or changes stored data or running requests, or shows options: not for web pages of other origins."""
    CONTROL = "control"
    """Changes the server for all clients: restricted like ``PRIVATE``, and requires an admin key if there are several
    API keys."""


class OriginPolicy:
    """Rejects requests that a browser sends for a page of another site (CSRF), if no API key is required.

    - A page with an ``Origin`` in ``allowed`` may call every route. ``*`` has no effect here.
    - Any other ``Origin`` must be the server's origin. Without ``Origin``, ``Sec-Fetch-Site`` must not name another
      site. If a browser sends a GET that changes the server, ``Sec-Fetch-Site`` or ``Referer`` must show the same
      origin, because image requests of other sites have no ``Origin``.
    - ``Host`` must be an address, a name without dots, a name of this machine or of an allowed origin: another site may
      have made its name resolve to this server (DNS rebinding). A server on a loopback address checks ``Host`` for
      every client, and also rejects unknown names without dots. Other servers check it for browsers, and for every
      client in GETs that change the server.

    Args:
        allowed: origins of ``--allowed-origins``.
        host: address on which the server listens.
    """

    def __init__(self, allowed: Collection[str], host: str) -> None:
        self._origins = origins_of(allowed)
        self._allowed = frozenset(self._origins) - {"*"}
        machine = socket.gethostname().lower()
        self._names = {name for origin in self._allowed if (name := urlsplit(origin).hostname)}
        self._names |= {host.lower(), machine, f"{machine.partition('.')[0]}.local", *DOCKER_NAMES}
        self._is_local = _is_loopback(host)
        if not self._is_local:  # in a thread: getfqdn may wait for DNS
            Thread(target=lambda: self._names.add(socket.getfqdn().lower()), daemon=True).start()

    def check(self, scope: Scope, access: Access) -> None:
        """Raise ``PenstockError`` (``unauthorized``) if the request may not call a route of this class."""
        if access not in (Access.PRIVATE, Access.CONTROL):
            return
        record = record_of(scope)
        if access is Access.CONTROL and not record.may_control:
            raise PenstockError(Code.UNAUTHORIZED, NO_CONTROL)
        if record.has_key:
            return
        headers = Headers(scope=scope)
        if _origin(headers.get("origin", "")) in self._allowed:
            return  # other pages cannot send this Origin
        changes = access is Access.CONTROL and scope["method"] in ("GET", "HEAD")
        if not self._is_own_origin(headers, changes):
            raise PenstockError(Code.UNAUTHORIZED, self._other_site(headers))
        host = headers.get("host", "")
        if (self._is_local or changes or _is_browser(headers)) and not self._is_own_host(host):
            raise PenstockError(Code.UNAUTHORIZED, self._other_host(host, scope.get("scheme", "http")))

    def _is_own_origin(self, headers: Headers, changes: bool) -> bool:
        host = headers.get("host", "")
        if (origin := headers.get("origin")) is not None:
            return self._matches(origin, host)
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site in ("same-origin", "none")
        return not (changes and _is_browser(headers)) or self._matches(headers.get("referer", ""), host)

    def _matches(self, url: str, host: str) -> bool:
        """Check whether the origin of a URL is the server's (``Host``) or allowed. Schemes are not compared: a
        proxy may have terminated TLS."""
        if (origin := _origin(url)) is None:
            return False
        scheme, _, address = origin.partition("://")
        return origin in self._allowed or address == _without_default_port(host, scheme)

    def _is_own_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if not name:
            return False
        if _is_address(name) or name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        return not self._is_local and "." not in name

    def _other_site(self, headers: Headers) -> str:
        origin = _origin(headers.get("origin", headers.get("referer", "")))
        advice = self._option(origin) if origin else "add the page's origin to --allowed-origins"
        evidence = (f"{name}: {headers[name]}" for name in ("Origin", "Sec-Fetch-Site", "Referer") if name in headers)
        given = next(evidence, "no Origin")
        return f"private route called by a page of another site ({given}): {advice}, or set --api-key"

    def _other_host(self, host: str, scheme: str) -> str:
        origin = _origin(f"{scheme}://{host}")
        advice = f"or {self._option(origin)}" if origin else "or add the page's origin to --allowed-origins"
        return (
            f"Host {host!r} is not a known name of this server, and may belong to another site: "
            f"use localhost or the address, {advice}, or set --api-key"
        )

    def _option(self, origin: str) -> str:
        """Advice to allow an origin in addition to the allowed origins."""
        return f"start the server with --allowed-origins '{','.join([*self._origins, origin])}'"


def origins_of(allowed: Collection[str]) -> list[str]:
    """Normalized origins of ``--allowed-origins``, and ``*``, without entries that match no page."""
    found = ("*" if entry == "*" else _origin(entry) for entry in allowed)
    return [origin for origin in found if origin == "*" or (origin and origin.isascii() and "*" not in origin)]


def unmatched(allowed: Collection[str]) -> Iterator[str]:
    """Entries of ``--allowed-origins`` that match no page, including ``null``, which pages of any site can send."""
    return (entry for entry in allowed if not origins_of([entry]))


def _origin(url: str) -> str | None:
    """Scheme, host and port of a URL, without the default port; None if it has no origin (``null``)."""
    try:
        parts = urlsplit(url)
        if not parts.scheme or not parts.hostname or parts.port == 0:
            return None
    except ValueError:
        return None
    scheme = parts.scheme.lower()
    return f"{scheme}://{_without_default_port(parts.netloc.rpartition('@')[2], scheme)}"


def _without_default_port(host: str, scheme: str) -> str:
    return host.lower().removesuffix(DEFAULT_PORTS.get(scheme, ":"))


def _is_browser(headers: Headers) -> bool:
    """Check whether a browser may have sent a request.

    Pages can change ``User-Agent`` but cannot omit ``Accept-Language``. Node.js also sends it, together with
    ``Sec-Fetch-Mode`` but without ``Sec-Fetch-Site``; pages cannot set these, and browsers send both.
    """
    if any(name in headers for name in ("origin", "referer", "sec-fetch-site")):
        return True
    if headers.get("user-agent", "").startswith("Mozilla/"):
        return True
    return "accept-language" in headers and "sec-fetch-mode" not in headers


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
