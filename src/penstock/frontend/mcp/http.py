"""HTTP transport of MCP connections: bounded responses, and only public addresses for URLs from clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpcore2
import httpx2

from penstock.frontend.multimodal.guarded_http import ForbiddenAddressError, public_address
from penstock.version import __version__

from .config import HttpServer


class BoundedStream(httpx2.AsyncByteStream):
    """Body of a response, which fails when it exceeds ``maximum`` bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream, maximum: int) -> None:
        self._stream = stream
        self._left = maximum

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise httpx2.StreamError("the response is too large")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """Transport that limits the size of responses, and optionally the addresses that it connects to.

    With ``public_only``, it resolves the host and connects to the address that it has checked, so that a second DNS
    lookup cannot return another address (DNS rebinding).

    Args:
        max_size: maximum size of a response in bytes.
    """

    def __init__(self, max_size: int, public_only: bool) -> None:
        super().__init__()
        self._max_size = max_size
        self._public_only = public_only

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(await self._checked(request) if self._public_only else request)
        if response.headers.get("content-encoding", "identity") != "identity":  # could expand to any size
            await response.aclose()
            raise httpx2.DecodingError("the response is compressed, although that was not requested", request=request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = BoundedStream(response.stream, self._max_size)
        return response

    async def _checked(self, request: httpx2.Request) -> httpx2.Request:
        """Return a request to the checked address of the host; certificates are checked for the host."""
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            address = await asyncio.to_thread(public_address, url.host, port)
        except (ForbiddenAddressError, httpcore2.ConnectError) as error:
            raise httpx2.ConnectError(str(error), request=request) from error
        return httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,  # they include Host
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )


def http_client(server: HttpServer, max_size: int, timeout: float) -> httpx2.AsyncClient:
    """Create the HTTP client of a connection. Redirects are not followed to other hosts; no proxy is used.

    Args:
        max_size: maximum size of a response in bytes.
        timeout: maximum seconds to connect, and between two parts of a request or response.
    """
    headers = {"User-Agent": f"penstock/{__version__}", "Accept-Encoding": "identity", **server.headers}
    transport = BoundedTransport(max_size, server.public_only)
    return httpx2.AsyncClient(headers=headers, transport=transport, timeout=timeout, trust_env=False)
