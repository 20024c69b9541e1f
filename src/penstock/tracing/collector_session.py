"""HTTP session of the OTLP exporter, which limits the size of responses and rejects redirects."""

from __future__ import annotations

from typing import Any

import requests

from penstock.core.numbers import read_decimal

MAX_RESPONSE = 2**14
"""Maximum bytes of a response body, which is read only so that the connection can be reused."""


class CollectorSession(requests.Session):
    """A session that discards response bodies.

    Raises ``requests.RequestException`` for a redirect, which the exporter would count as success.
    """

    def request(self, method: str | bytes, url: str | bytes, *args: Any, **named: Any) -> requests.Response:
        response = super().request(method, url, *args, **{**named, "stream": True, "allow_redirects": False})
        length = read_decimal(response.headers.get("content-length", ""), MAX_RESPONSE)
        if response.raw is not None and length:
            response.raw.read(length)
        response.close()
        response._content = b""
        if 300 <= response.status_code < 400:
            raise requests.RequestException(f"the collector returned a redirect (status {response.status_code})")
        return response
