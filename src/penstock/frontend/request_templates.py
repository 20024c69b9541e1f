"""Chat templates that come with requests: rendered where they can do no harm (``penstock.text.template_process``)."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.text.template_process import MOST_RENDERED, SECONDS, RenderRequest, RenderResult


class TemplateRenderer:
    """A process that renders, one conversation at a time; started when the first one comes, and again when it died."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, asked: RenderRequest) -> str:
        """Raises ``PenstockError`` (``invalid``) where the template is wrong, or takes too long."""
        try:
            told = msgspec.json.encode(asked) + b"\n"
        except (UnicodeEncodeError, RecursionError) as error:
            raise invalid("messages", f"cannot be rendered: {error}") from error
        async with self._turn:
            try:
                line = await self._ask(told)
            except BaseException:
                self.close()  # a reply that nobody waits for is not to be the next one's
                raise
        if not line:
            self.close()
            raise invalid("chat_template", f"takes longer than {SECONDS:g} seconds, or too much memory", SECONDS)
        reply = msgspec.json.decode(line, type=RenderResult)
        if reply.failure:
            raise PenstockError.of(reply.failure)
        return reply.text

    def close(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _ask(self, line: bytes) -> bytes:
        """Nothing where the process ended."""
        if self._process is None:
            command = [sys.executable, "-m", "penstock.text.template_process"]
            limit = 12 * MOST_RENDERED  # a character is no longer in JSON
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=limit)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        try:
            stdin.write(line)
            await stdin.drain()
            return await stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""
