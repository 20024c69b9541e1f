"""Who may call a route: classes of routes, and the checks of requests that a browser may send for another site."""

from __future__ import annotations

import socket
from collections.abc import Collection
from enum import Enum
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.core import Code, PenstockError

from .request_record import record_of

OTHER_SITE = (
    "a page of another site asks for what is private here: give its origin in --allowed-origins, or set --api-key"
)
OTHER_HOST = (
    "the name in Host is not known as this server's, so that a page of another site may have made it up: use "
    "localhost or the address, give the page's origin in --allowed-origins, or set --api-key"
)
NO_CONTROL = "this changes the server for all of its API keys: use a key of --admin-api-key"


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

    - ``Origin`` must be the server's own or one of ``allowed``; ``*`` allows none here.
    - Without ``Origin``, ``Sec-Fetch-Site`` must not say that another site asks. A GET that changes something needs
      evidence of the same origin if a browser sends it, as images of other sites have no ``Origin``.
    - ``Host`` must be an address, a name without dots, a name of this machine or of an allowed origin. Other names may
      have been made to resolve to this server by another site (DNS rebinding). A server that listens on loopback
      addresses asks this of every client, others ask it of browsers.

    Args:
        allowed: origins of ``--allowed-origins``.
        host: address on which the server listens.
    """

    def __init__(self, allowed: Collection[str], host: str) -> None:
        self._allowed = frozenset(filter(None, map(_origin, allowed)))
        self._names = {name for origin in self._allowed if (name := urlsplit(origin).hostname)}
        self._names |= {host.lower(), socket.gethostname().lower()}
        self._is_local = _is_loopback(host)
        self._full_name: str | None = None

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
        if not self._is_own_origin(scope, headers, access):
            raise PenstockError(Code.UNAUTHORIZED, OTHER_SITE)
        if (self._is_local or _is_browser(headers)) and not self._is_own_host(headers.get("host", "")):
            raise PenstockError(Code.UNAUTHORIZED, OTHER_HOST)

    def _is_own_origin(self, scope: Scope, headers: Headers, access: Access) -> bool:
        host = headers.get("host", "")
        if (origin := headers.get("origin")) is not None:
            return self._matches(origin, host)
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site in ("same-origin", "none")
        if access is Access.CONTROL and scope["method"] in ("GET", "HEAD") and _is_browser(headers):
            return self._matches(headers.get("referer", ""), host)
        return True

    def _matches(self, url: str, host: str) -> bool:
        """Whether the origin of a URL is the server's own, as ``Host`` says, or an allowed one. Schemes are not
        compared, as a proxy may have ended TLS."""
        origin = _origin(url)
        return origin is not None and (origin in self._allowed or _place(origin.partition("://")[2]) == _place(host))

    def _is_own_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if not name:
            return False
        if _is_address(name) or name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        return not self._is_local and ("." not in name or name == self._own_full_name)

    @property
    def _own_full_name(self) -> str:
        if self._full_name is None:
            self._full_name = socket.getfqdn().lower()
        return self._full_name


def _origin(url: str) -> str | None:
    """Scheme, host and port of a URL; None for what has none, such as ``null``, and for what is no URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return f"{parts.scheme}://{parts.netloc}".lower() if parts.scheme and parts.netloc else None


def _place(host: str) -> str:
    """Host and port, without a default port."""
    return host.lower().removesuffix(":80").removesuffix(":443")


def _is_browser(headers: Headers) -> bool:
    """Whether a browser sends this, which names itself Mozilla whatever a page wants."""
    by_headers = any(name in headers for name in ("origin", "referer", "sec-fetch-site"))
    return by_headers or headers.get("user-agent", "").startswith("Mozilla/")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
