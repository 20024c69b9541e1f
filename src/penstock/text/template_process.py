"""Chat templates rendered in a process with limits (``python -m penstock.text.template_process DESCRIPTOR``).

The sandbox of Jinja limits access, not computation. Here a timer interrupts a template after its processor time, and
the address space is limited. The process goes on after both, unless much memory has been used.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import FrameType
from typing import Any

import msgspec

from penstock.core import Failure, PenstockError
from penstock.core.errors import invalid

from .chat_template import ChatTemplate
from .isolated_process import receive, send

MAX_MEMORY = 2**30
"""Bytes of address space."""
RECYCLED_MEMORY = 2**28
"""Bytes of resident memory after which a process ends with its reply."""
MAX_RENDERED = 2**26
"""Characters of a rendered prompt."""
MAX_COMPILED = 16
"""Compiled templates that are kept."""
INTERRUPT_AGAIN = 0.05
"""Seconds of processor time after which a template that has gone on is interrupted again."""


class RenderRequest(msgspec.Struct):
    """A request."""

    source: str
    special: dict[str, str]
    messages: list[Mapping[str, Any]]
    options: dict[str, Any]
    """Keyword arguments of ``ChatTemplate.render``."""
    cpu_time: float
    """Seconds of processor time, compilation included."""


class RenderResult(msgspec.Struct, omit_defaults=True):
    """A reply: the text, or why there is none."""

    text: str = ""
    failure: Failure | None = None
    exceeded: bool = False
    """Time or memory was not enough."""
    last: bool = False
    """The process ends."""


class _TimeOver(BaseException):
    """Raised in a template whose processor time is over. No ``except Exception`` catches it."""


@lru_cache(MAX_COMPILED)
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _render(request: RenderRequest) -> RenderResult:
    try:
        template = _compiled(request.source, tuple(request.special.items()))
        text = template.render(request.messages, **request.options)
        if len(text) > MAX_RENDERED:
            raise invalid("chat_template", f"renders more than {MAX_RENDERED} characters", MAX_RENDERED)
        text.encode()
    except PenstockError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from error
        return RenderResult(failure=error.failure)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        return RenderResult(failure=invalid("chat_template", f"cannot be used: {error!r:.200}").failure)
    return RenderResult(text)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise _TimeOver


def _reply(message: bytes) -> RenderResult:
    try:
        request = msgspec.json.decode(message, type=RenderRequest)
        try:
            signal.setitimer(signal.ITIMER_PROF, request.cpu_time, INTERRUPT_AGAIN)
            return _render(request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TimeOver:
        return RenderResult(exceeded=True)
    except MemoryError:
        return RenderResult(exceeded=True, last=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGPROF, _interrupt)
    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(OSError):  # the parent has closed
        while True:
            reply = _reply(receive(connection))
            reply.last |= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > RECYCLED_MEMORY
            send(connection, msgspec.json.encode(reply))
            if reply.last:
                return


if __name__ == "__main__":
    main()
