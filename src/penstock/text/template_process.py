"""Chat templates of requests, rendered in a process with limits (``python -m penstock.text.template_process``).

It reads one request per line on standard input and writes one reply per line on standard output. A timer kills the
process where a template takes too long; the caller then starts another one.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.core import Failure, PenstockError
from penstock.core.errors import invalid

from .chat_template import ChatTemplate

RENDER_TIMEOUT = 2.0
"""Seconds for one rendering, compilation included."""
MAX_MEMORY = 2 * 2**30
"""Bytes of address space."""
MAX_RENDERED = 2**24
"""Characters of a rendered prompt."""
MAX_COMPILED = 16
"""Compiled templates that are kept."""


class RenderRequest(msgspec.Struct):
    """A request."""

    source: str
    special: dict[str, str]
    messages: list[Mapping[str, Any]]
    options: dict[str, Any]
    """Keyword arguments of ``ChatTemplate.render``."""


class RenderResult(msgspec.Struct):
    """A reply: the text, or why there is none."""

    text: str = ""
    failure: Failure | None = None


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
        return RenderResult(failure=error.failure)
    except Exception as error:
        return RenderResult(failure=invalid("chat_template", f"cannot be used: {error!r:.200}").failure)
    return RenderResult(text)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    decode, encode = msgspec.json.Decoder(RenderRequest).decode, msgspec.json.Encoder().encode
    for line in sys.stdin.buffer:
        request = decode(line)
        signal.setitimer(signal.ITIMER_REAL, RENDER_TIMEOUT)
        reply = encode(_render(request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
