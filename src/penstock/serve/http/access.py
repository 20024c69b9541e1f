"""Access classes of routes, and checks of Origin and Host."""

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

NO_CONTROL = "this changes the server for all of its API keys: use a key of --admin-api-key"
DOCKER_NAMES = ("host.docker.internal", "host.containers.internal")
"""Names of this machine in containers of Docker and Podman."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Access(Enum):
    """Class of a route."""

    PUBLIC = "public"
    """Health, version, metrics, the web page: needs no API key."""
    SIGNED = "signed"
    """Needs the signature of the cluster in place of an API key."""
    INFERENCE = "inference"
    """Computes, or describes models: pages of other sites may call it as CORS allows."""
    PRIVATE = "private"
    """Reads or changes what is stored or runs for the client, or shows options: not for pages of other sites."""
    CONTROL = "control"
    """Changes the server for everybody: as ``PRIVATE``, and needs an administrative key where there are several."""


class OriginPolicy:
    """Refuses requests that a browser sends for a page of another site, where no API key is asked for.

    - A page whose ``Origin`` is one of ``allowed`` may call every route; ``*`` allows none here.
    - Any other ``Origin`` must be the server's own. Without ``Origin``, ``Sec-Fetch-Site`` must not say that another
      site asks. A GET that changes the server needs evidence of the same origin if a browser sends it, as images of
      other sites have no ``Origin``.
    - ``Host`` must be an address, a name without dots, a name of this machine or of an allowed origin. Other names may
      have been made to resolve to this server by another site (DNS rebinding). A server that listens on loopback
      addresses checks ``Host`` for every client and refuses unknown names without dots, too. Other servers check it
      for browsers, and for every client in GETs that change the server.

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
        if not self._is_local:  # in a thread, as it may wait for DNS
            Thread(target=lambda: self._names.add(socket.getfqdn().lower()), daemon=True).start()

    def check(self, scope: Scope, access: Access) -> None:
        """Raises ``PenstockError`` (``unauthorized``) where the request may not call a route of this class."""
        if access not in (Access.PRIVATE, Access.CONTROL):
            return
        record = record_of(scope)
        if access is Access.CONTROL and not record.may_control:
            raise PenstockError(Code.UNAUTHORIZED, NO_CONTROL)
        if record.has_key:
            return
        headers = Headers(scope=scope)
        if _origin(headers.get("origin", "")) in self._allowed:
            return  # other pages cannot send it, whatever name of the server they use
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
        """Whether the origin of a URL is the server's own, as ``Host`` says, or an allowed one. Schemes are not
        compared, as a proxy may have ended TLS."""
        if (origin := _origin(url)) is None:
            return False
        scheme, _, place = origin.partition("://")
        return origin in self._allowed or place == _place(host, scheme)

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
        advice = self._option(origin) if origin else "name the page's origin in --allowed-origins"
        evidence = (f"{name}: {headers[name]}" for name in ("Origin", "Sec-Fetch-Site", "Referer") if name in headers)
        given = next(evidence, "no Origin")
        return f"a page of another site ({given}) calls a private route: {advice}, or set --api-key"

    def _other_host(self, host: str, scheme: str) -> str:
        origin = _origin(f"{scheme}://{host}")
        advice = f"or {self._option(origin)}" if origin else "or name the page's origin in --allowed-origins"
        return (
            f"{host!r} in Host is no known name of this server, so that a page of another site may have made it up: "
            f"use localhost or the address, {advice}, or set --api-key"
        )

    def _option(self, origin: str) -> str:
        """Advice to allow an origin, beside those that are allowed now."""
        return f"start the server with --allowed-origins '{','.join([*self._origins, origin])}'"


def origins_of(allowed: Collection[str]) -> list[str]:
    """The origins that ``--allowed-origins`` allows, as browsers write them, and ``*``; without ``unmatched``."""
    found = ("*" if entry == "*" else _origin(entry) for entry in allowed)
    return [origin for origin in found if origin == "*" or (origin and origin.isascii() and "*" not in origin)]


def unmatched(allowed: Collection[str]) -> Iterator[str]:
    """Entries of ``--allowed-origins`` that match no page. ``null`` is one, as pages of every site can have it."""
    return (entry for entry in allowed if not origins_of([entry]))


def _origin(url: str) -> str | None:
    """Scheme, host and port of a URL, without a default port; None for what has none, such as ``null``."""
    try:
        parts = urlsplit(url)
        if not parts.scheme or not parts.hostname or parts.port == 0:
            return None
    except ValueError:
        return None
    scheme = parts.scheme.lower()
    return f"{scheme}://{_place(parts.netloc.rpartition('@')[2], scheme)}"


def _place(host: str, scheme: str) -> str:
    """Host and port, without the default port of a scheme."""
    return host.lower().removesuffix(DEFAULT_PORTS.get(scheme, ":"))


def _is_browser(headers: Headers) -> bool:
    """Whether a browser may have sent a request.

    Pages can change ``User-Agent`` but cannot leave ``Accept-Language`` out. Node.js sends it, too, with
    ``Sec-Fetch-Mode`` alone, which pages cannot set and browsers send with ``Sec-Fetch-Site``.
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
