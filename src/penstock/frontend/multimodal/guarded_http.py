"""HTTP client for URLs in requests. It connects only to public addresses (protection against SSRF)."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Collection, Iterable
from typing import Any

import httpcore2
import httpx2

from penstock.core import Code, PenstockError
from penstock.version import __version__

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)


class ForbiddenAddressError(Exception):
    """The host is not allowed, or has a non-public address."""


class FetchError(Exception):
    """A URL cannot be fetched, or redirects too often."""


class GuardedBackend(httpcore2.NetworkBackend):
    """Network backend that connects only to hosts with public addresses, or to a list of allowed hosts.

    It connects to the address that was checked, also after redirects, so that a second DNS lookup cannot return another
    address (DNS rebinding).

    Args:
        domains: allowed hosts, with any address; empty: all hosts with public addresses.
    """

    def __init__(self, domains: Collection[str]) -> None:
        self._backend = httpcore2.SyncBackend()
        self._domains = domains

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect, or raise ``ForbiddenAddressError``."""
        if self._domains and host.lower().rstrip(".") not in self._domains:
            raise ForbiddenAddressError(f"{host:.100} is not in allowed_media_domains")
        address = host if self._domains else public_address(host, port)
        return self._backend.connect_tcp(address, port, timeout, local_address, socket_options)

    def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore2.NetworkStream:
        raise ForbiddenAddressError("Unix sockets are not allowed")


def public_address(host: str, port: int) -> str:
    """Resolve a host to an address. Raises ``ForbiddenAddressError`` unless all its addresses are public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore2.ConnectError(f"{host:.100} cannot be resolved") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not all(map(is_public, addresses)):
        raise ForbiddenAddressError(f"{host:.100} has an address that is not public")
    return addresses[0]


def is_public(address: str) -> bool:
    """True for a public unicast IP address: not private, loopback, link-local, reserved or multicast, nor an IPv6
    address that embeds such an IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if parsed in ipaddress.ip_network("64:ff9b::/96"):  # NAT64 addresses embed IPv4 addresses
            embedded = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def download(url: str, max_size: int, timeout: float, domains: Collection[str]) -> bytes:
    """Download the body of an ``http:`` or ``https:`` URL. Redirects are followed; no proxy is used.

    Args:
        max_size: limit of the body in bytes.
        timeout: limit of the total time in seconds.
        domains: as for ``GuardedBackend``.

    Raises ``PenstockError`` (``too_large``, ``timeout``), ``ForbiddenAddressError``, and ``FetchError``.
    """
    deadline = time.monotonic() + timeout
    headers = [("User-Agent", f"penstock/{__version__}"), ("Accept-Encoding", "identity")]
    timeouts = {kind: timeout for kind in ("connect", "read", "write", "pool")}
    try:
        with httpcore2.ConnectionPool(network_backend=GuardedBackend(domains)) as pool:
            for _ in range(MAX_REDIRECTS + 1):
                parsed = httpx2.URL(url)
                if parsed.scheme not in ("http", "https") or not parsed.host:
                    raise FetchError("it redirects to a URL that is not HTTP")
                target = httpcore2.URL(
                    scheme=parsed.raw_scheme, host=parsed.raw_host, port=parsed.port, target=parsed.raw_path
                )
                with pool.stream("GET", target, headers=headers, extensions={"timeout": timeouts}) as response:
                    if response.status in REDIRECTS:
                        location = dict((name.lower(), value) for name, value in response.headers).get(b"location", b"")
                        url = str(parsed.join(location.decode("ascii")))
                        continue
                    if response.status != 200:
                        raise FetchError(f"the server returned status {response.status}")
                    return _read(response, max_size, deadline)
        raise FetchError(f"it redirects more than {MAX_REDIRECTS} times")
    except (httpcore2.TimeoutException, TimeoutError) as error:
        raise PenstockError(Code.TIMEOUT, f"was not received within {timeout:g} seconds") from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.UnsupportedProtocol) as error:
        raise FetchError(str(error) or type(error).__name__) from error
    except (httpx2.InvalidURL, UnicodeError, ValueError, OSError) as error:
        raise FetchError(f"{error}") from error


def _read(response: httpcore2.Response, max_size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    for part in response.iter_stream():
        parts.append(part)
        size += len(part)
        if size > max_size:
            raise PenstockError(Code.TOO_LARGE, f"has more than {max_size} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)
