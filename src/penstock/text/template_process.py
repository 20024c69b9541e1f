"""Chat templates of requests, rendered in a process with limits (``python -m penstock.text.template_process``).

It reads a request a line on standard input and writes a reply a line on standard output. Whatever a template does, it
does not do it for long: an alarm ends the process, and the next request is another one's.
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

SECONDS = 2.0
"""For one rendering, compiling included."""
MEMORY = 2 * 2**30
"""Bytes of address space."""
MOST_RENDERED = 2**24
"""Characters of a rendering."""
KEPT = 16
"""Compiled templates."""


class RenderRequest(msgspec.Struct):
    """A request."""

    source: str
    special: dict[str, str]
    messages: list[Mapping[str, Any]]
    options: dict[str, Any]
    """Those of ``ChatTemplate.render``."""


class RenderResult(msgspec.Struct):
    """A reply: the text, or why there is none."""

    text: str = ""
    failure: Failure | None = None


@lru_cache(KEPT)
def _compiled(source: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special))


def _render(asked: RenderRequest) -> RenderResult:
    try:
        template = _compiled(asked.source, tuple(asked.special.items()))
        text = template.render(asked.messages, **asked.options)
        if len(text) > MOST_RENDERED:
            raise invalid("chat_template", f"makes more than {MOST_RENDERED} characters", MOST_RENDERED)
        text.encode()
    except PenstockError as error:
        return RenderResult(failure=error.failure)
    except Exception as error:
        return RenderResult(failure=invalid("chat_template", f"cannot be used: {error!r:.200}").failure)
    return RenderResult(text)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the whole group; the parent decides
    decode, encode = msgspec.json.Decoder(RenderRequest).decode, msgspec.json.Encoder().encode
    for line in sys.stdin.buffer:
        asked = decode(line)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        reply = encode(_render(asked))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
