"""The HTTP session of the OTLP exporter: bounds what a collector's answer costs, and refuses redirects."""

from __future__ import annotations

from typing import Any

import requests

from penstock.core.numbers import read_decimal

MAX_ANSWER = 2**14
"""Bytes of an answer that are read, to use the connection again; nothing depends on them."""


class CollectorSession(requests.Session):
    """A session whose answers have no body.

    Raises ``requests.RequestException`` for a redirect, which the exporter would count as success.
    """

    def request(self, method: str | bytes, url: str | bytes, *args: Any, **named: Any) -> requests.Response:
        response = super().request(method, url, *args, **{**named, "stream": True, "allow_redirects": False})
        length = read_decimal(response.headers.get("content-length", ""), MAX_ANSWER)
        if response.raw is not None and length:
            response.raw.read(length)
        response.close()
        response._content = b""
        if 300 <= response.status_code < 400:
            raise requests.RequestException(f"the collector redirects with status {response.status_code}")
        return response
