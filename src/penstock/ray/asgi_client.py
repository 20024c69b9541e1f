"""Client of an ASGI application in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from starlette.types import ASGIApp, Message, Scope


async def post(app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes | int, None]:
    """POST a request; yield the response's status, and then the chunks of its body.

    Closing the generator disconnects, which cancels the request.
    """
    events: asyncio.Queue[Message | None] = asyncio.Queue()
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    disconnected = asyncio.Event()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        events.put_nowait(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
    request = asyncio.ensure_future(app(scope, receive, send))
    request.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            if event["type"] == "http.response.start":
                yield event["status"]
            elif data := event.get("body"):
                yield data
    finally:
        disconnected.set()
    await request
