"""Ranges of files over HTTP: redirects, statuses and broken connections."""

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
"""Seconds for a connection, and without a byte."""
BLOCK_BYTES = 2**20
MAX_REDIRECTS = 10
MAX_SIZE = 2**63 - 1
"""Bytes of a file."""
MAX_PAUSE = 10**9
"""Seconds of ``Retry-After`` that are read as a number."""
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which another attempt may succeed."""
STALE = (400, 401, 403, 404, 410)
"""Statuses of signed addresses that have expired."""
PERMANENT = (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL, httpx2.DecodingError)


class HTTPRanges:
    """Reads ranges of files.

    The address that an address is redirected to is remembered, so that hubs are asked once a file.

    Args:
        headers: sent to the first address, and to others of the same origin.
        max_connections: at the same time.
        explain: the error for a status after which another attempt is of no use.
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
        """A response, whose body is not read yet, of any status but those of ``TRANSIENT``.

        Raises ``InterruptedTransferError``, also while the body is read; ``PenstockError`` where another attempt is of
        no use.
        """
        shown = without_secrets(url)
        try:
            place = self._redirected.get(url)
            if place:
                with self._client.stream("GET", place, headers=dict(headers)) as response:
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
            raise invalid("model", f"{shown} is redirected to an address that cannot be read ({error})") from error
        except httpx2.HTTPError as error:
            raise InterruptedTransferError(str(error) or type(error).__name__) from error

    def read(self, url: str, start: int, end: int, size: int, version: str = "") -> Iterator[bytes]:
        """The bytes of a range, as ``Source.read``.

        Args:
            size: of the file, which the response has to repeat.
            version: the file's ETag; of another one no byte is taken.
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
                    raise InterruptedTransferError(f"a range from {first} was sent in place of one from {start}")
            elif start:
                raise RangesIgnoredError
            left = end - start
            for block in response.iter_raw(BLOCK_BYTES):
                yield block[:left]
                left -= len(block)
                if left <= 0:
                    return


def content_range(response: httpx2.Response) -> tuple[int | None, int | None]:
    """First byte and the file's size in a ``Content-Range``; None for what it does not say."""
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    if unit != "bytes":
        return None, None
    return read_decimal(first, MAX_SIZE), read_decimal(total, MAX_SIZE)


def _refused(response: httpx2.Response) -> PenstockError:
    return unavailable(without_secrets(str(response.url)), status_of(response))


def status_of(response: httpx2.Response) -> str:
    """The status in words."""
    return f"status {response.status_code} {response.reason_phrase}".strip()


def get_json(ranges: HTTPRanges, url: str, limit: int) -> tuple[int, Any]:
    """Status and JSON document of a response; None where it is not JSON, or has more than ``limit`` bytes."""
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
    """A URL for messages: without user, password, query and fragment."""
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(userinfo=b"", query=None, fragment=None))


def _check_transient(response: httpx2.Response) -> None:
    if response.status_code in TRANSIENT:
        pause = _retry_after(response.headers.get("Retry-After", ""))
        raise InterruptedTransferError(status_of(response), pause)


def _retry_after(text: str) -> float:
    """Seconds; 0 for none."""
    if (seconds := read_decimal(text.strip(), MAX_PAUSE)) is not None:
        return float(seconds)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)


def _refuse_downgrade(response: httpx2.Response) -> None:
    """Contents that were asked for by TLS do not come without."""
    if response.has_redirect_location and response.url.scheme == "https":
        scheme = response.url.join(response.headers["Location"]).scheme
        if scheme != "https":
            raise httpx2.UnsupportedProtocol(f"{scheme}:// in place of https://")


def _changed(url: str) -> PenstockError:
    return invalid("model", f"{without_secrets(url)} has changed while it was fetched: start again")
