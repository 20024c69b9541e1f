"""Chat templates of requests, rendered in a sandboxed process (``penstock.text.template_process``)."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.text.template_process import MAX_RENDERED, RENDER_TIMEOUT, RenderRequest, RenderResult


class SandboxedTemplateRenderer:
    """Renders chats one at a time in another process; starts it with the first chat, and again when it has died.

    A terminal's Ctrl-C does not reach it, so that it ends what it is asked while the server drains.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, request: RenderRequest) -> str:
        """Render a chat. Raises ``PenstockError`` (``invalid``) where the template is wrong, or takes too long."""
        try:
            message = msgspec.json.encode(request) + b"\n"
        except (UnicodeEncodeError, RecursionError) as error:
            raise invalid("messages", f"cannot be rendered: {error}") from error
        async with self._turn:
            try:
                line = await self._send(message)
            except BaseException:
                self.close()  # the late reply must not be taken for the next request's
                raise
        if not line:
            self.close()
            reason = f"takes longer than {RENDER_TIMEOUT:g} seconds, or too much memory"
            raise invalid("chat_template", reason, RENDER_TIMEOUT)
        reply = msgspec.json.decode(line, type=RenderResult)
        if reply.failure:
            raise PenstockError.of(reply.failure)
        return reply.text

    def close(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _send(self, line: bytes) -> bytes:
        """The reply; empty where the process has died."""
        if self._process is None:
            command = [sys.executable, "-m", "penstock.text.template_process"]
            limit = 12 * MAX_RENDERED  # bytes of a character in JSON, at most
            self._process = await asyncio.create_subprocess_exec(  # uvloop knows no process_group
                *command, stdin=PIPE, stdout=PIPE, limit=limit, start_new_session=True
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        try:
            stdin.write(line)
            await stdin.drain()
            return await stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""
