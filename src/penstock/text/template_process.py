"""Chat templates rendered in a process with limits (``python -m penstock.text.template_process DESCRIPTOR``).

Jinja's sandbox limits access, not computation. Here a timer interrupts a template that exceeds its processor time, and
the address space is limited. The process continues after a timeout; it ends after running out of memory, or when its
resident memory exceeds ``RECYCLED_MEMORY``.
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
"""Maximum address space in bytes."""
RECYCLED_MEMORY = 2**28
"""Resident memory in bytes above which the process ends after its reply."""
MAX_RENDERED = 2**26
"""Maximum number of characters of a rendered prompt."""
MAX_COMPILED = 16
"""Maximum number of compiled templates in the cache."""
INTERRUPT_AGAIN = 0.05
"""Processor time in seconds between interrupts of a template that continues after the first interrupt."""


class RenderRequest(msgspec.Struct):
    """A request to the rendering process."""

    source: str
    special: dict[str, str]
    messages: list[Mapping[str, Any]]
    options: dict[str, Any]
    """Keyword arguments of ``ChatTemplate.render``."""
    cpu_time: float
    """Maximum processor time in seconds, including compilation."""


class RenderResult(msgspec.Struct, omit_defaults=True):
    """A reply: the rendered text, or the reason why rendering failed."""

    text: str = ""
    failure: Failure | None = None
    exceeded: bool = False
    """True if the time or memory limit was exceeded."""
    last: bool = False
    """True if the process ends after this reply."""


class _TimeLimitExceeded(BaseException):
    """Raised in a template that exceeds its processor time. A ``BaseException``, so that ``except Exception`` does not
    catch it."""


@lru_cache(MAX_COMPILED)
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _render(request: RenderRequest) -> RenderResult:
    try:
        template = _compiled(request.source, tuple(request.special.items()))
        text = template.render(request.messages, **request.options)
        if len(text) > MAX_RENDERED:
            message = f"renders a prompt of {len(text)} characters; the limit is {MAX_RENDERED}"
            raise invalid("chat_template", message, MAX_RENDERED)
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
    raise _TimeLimitExceeded


def _reply(message: bytes) -> RenderResult:
    try:
        request = msgspec.json.decode(message, type=RenderRequest)
        try:
            signal.setitimer(signal.ITIMER_PROF, request.cpu_time, INTERRUPT_AGAIN)
            return _render(request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TimeLimitExceeded:
        return RenderResult(exceeded=True)
    except MemoryError:
        return RenderResult(exceeded=True, last=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGPROF, _interrupt)
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(OSError),
    ):  # OSError: the parent has closed the socket
        while True:
            reply = _reply(receive(connection))
            reply.last |= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > RECYCLED_MEMORY
            send(connection, msgspec.json.encode(reply))
            if reply.last:
                return


if __name__ == "__main__":
    main()
