"""HTTP range requests, with handling of redirects, status codes and broken connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
import msgspec

from penstock.core.errors import PenstockError, invalid
from penstock.core.numbers import read_decimal
from penstock.version import __version__

from .remote import InterruptedTransferError, RangesIgnoredError, unavailable

CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0
"""Timeouts in seconds for connecting, and for each read of data."""
BLOCK_BYTES = 2**20
MAX_REDIRECTS = 10
MAX_SIZE = 2**63 - 1
"""Largest accepted file size in bytes."""
MAX_PAUSE = 10**9
"""Largest accepted ``Retry-After`` in seconds."""
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Status codes after which a retry may succeed."""
STALE = (400, 401, 403, 404, 410)
"""Status codes after which a cached redirect is dropped: its signed URL may have expired."""
PERMANENT = (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL, httpx2.DecodingError)
"""Errors after which a retry cannot succeed."""


class HTTPRanges:
    """Reads ranges of files over HTTP.

    Redirects are cached, so that a hub gets one request per file.

    Args:
        headers: headers for the first URL, and for redirects within its origin.
        max_connections: number of idle connections to keep open.
        explain: returns the error to raise for a response with a status that makes a retry useless.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 8,
        explain: Callable[[httpx2.Response], PenstockError] | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self._explain = explain or _refused
        self._client = httpx2.Client(
            headers={"User-Agent": f"penstock/{__version__}", "Accept-Encoding": "identity"},
            follow_redirects=True,
            max_redirects=MAX_REDIRECTS,
            timeout=httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=max_connections),
            event_hooks={"response": [_refuse_downgrade]},
        )
        self._redirected: dict[str, str] = {}

    @contextlib.contextmanager
    def open(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """Context with a streaming response of any status except ``TRANSIENT``.

        Raises ``InterruptedTransferError``, also while the body is read; ``PenstockError`` if a retry is useless.
        """
        try:
            if target := self._redirected.get(url):
                with self._client.stream("GET", target, headers=dict(headers)) as response:
                    if response.status_code not in STALE:
                        _check_transient(response)
                        yield response
                        return
                del self._redirected[url]
            with self._client.stream("GET", url, headers={**self._headers, **headers}) as response:
                _check_transient(response)
                if response.history and response.is_success:
                    self._redirected[url] = str(response.url)
                yield response
        except PERMANENT as error:
            message = f"{without_secrets(url)} is redirected to an address that cannot be read ({error})"
            raise invalid("model", message) from error
        except httpx2.HTTPError as error:
            raise InterruptedTransferError(str(error) or type(error).__name__) from error

    def read(self, url: str, start: int, end: int, size: int, version: str = "") -> Iterator[bytes]:
        """Read a range of a file, as ``Source.read``.

        Args:
            size: size of the file in bytes; a response with another size is an error.
            version: ETag of the file; a response with another ETag is an error. Empty: not checked.
        """
        with self.open(url, {"Range": f"bytes={start}-{end - 1}"}) as response:
            if not response.is_success:
                raise self._explain(response)
            if version and response.headers.get("ETag", version) != version:
                raise _changed(url)
            if response.status_code == 206:
                first, total = content_range(response)
                if total not in (None, size):
                    raise _changed(url)
                if first != start:
                    raise InterruptedTransferError(f"the server sent a range from {first} instead of {start}")
            elif start:
                raise RangesIgnoredError
            remaining = end - start
            for block in response.iter_raw(BLOCK_BYTES):
                yield block[:remaining]
                remaining -= len(block)
                if remaining <= 0:
                    return


def content_range(response: httpx2.Response) -> tuple[int | None, int | None]:
    """Offset and file size in a ``Content-Range``, None if unknown."""
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    if unit != "bytes":
        return None, None
    return read_decimal(first, MAX_SIZE), read_decimal(total, MAX_SIZE)


def _refused(response: httpx2.Response) -> PenstockError:
    return unavailable(without_secrets(str(response.url)), status_of(response))


def status_of(response: httpx2.Response) -> str:
    """Status code and reason phrase of a response."""
    return f"status {response.status_code} {response.reason_phrase}".strip()


def get_json(ranges: HTTPRanges, url: str, limit: int) -> tuple[int, Any]:
    """Status code and JSON body of a response; the body is None if it is not JSON, or exceeds ``limit`` bytes."""
    with ranges.open(url, {}) as response:
        body = b""
        for block in response.iter_bytes(BLOCK_BYTES):
            body += block
            if len(body) > limit:
                return response.status_code, None
        try:
            return response.status_code, msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return response.status_code, None


def without_secrets(url: str) -> str:
    """URL for messages, without user, password, query and fragment."""
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(userinfo=b"", query=None, fragment=None))


def _check_transient(response: httpx2.Response) -> None:
    if response.status_code in TRANSIENT:
        pause = _retry_after(response.headers.get("Retry-After", ""))
        raise InterruptedTransferError(status_of(response), pause)


def _retry_after(text: str) -> float:
    """Seconds to wait according to a ``Retry-After`` header; 0 if it is missing or malformed."""
    if (seconds := read_decimal(text.strip(), MAX_PAUSE)) is not None:
        return float(seconds)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)


def _refuse_downgrade(response: httpx2.Response) -> None:
    """Raise an error for a redirect from HTTPS to another scheme."""
    if response.has_redirect_location and response.url.scheme == "https":
        scheme = response.url.join(response.headers["Location"]).scheme
        if scheme != "https":
            raise httpx2.UnsupportedProtocol(f"{scheme}:// instead of https://")


def _changed(url: str) -> PenstockError:
    return invalid("model", f"{without_secrets(url)} has changed during the download: start again")
