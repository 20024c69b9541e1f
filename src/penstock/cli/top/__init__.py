"""``penstock top``: live view of a server in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any

from penstock.config.secrets import mask
from penstock.core.errors import invalid

from ..running_servers import DEFAULT_URL, default_url
from ..screen import can_print, has_escapes
from .view import ASCII, BLOCKS, History, render

TIMEOUT = 10.0
"""Timeout of a request in seconds."""
HOME = "\033[H"
ENTER, LEAVE = "\033[?1049h\033[?25l\033[2J", "\033[?25h\033[?1049l"
"""Escape sequences that enter the alternate screen and hide the cursor, and that leave it."""
ERASE_LINE, ERASE_BELOW = "\033[K", "\033[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"server (default: the only running server of this user, or {DEFAULT_URL})")
    parser.add_argument("--api-key", dest="key", metavar="KEY", help="API key (default: $PENSTOCK_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="update interval (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one view after two updates, and exit")


def run(args: argparse.Namespace) -> int:
    """Show the server until q or Ctrl-C. Returns 1 if the first request fails."""
    if args.interval <= 0:
        raise invalid("interval", f"must be above 0 seconds, is {args.interval:g}", 0)
    url, key = args.url or default_url(), args.key or os.environ.get("PENSTOCK_API_KEY", "").split(",")[0]
    history, on_screen = History(), has_escapes() and not args.once
    glyphs = BLOCKS if can_print("".join(BLOCKS)) else ASCII
    try:
        history.add(fetch(url, key))
    except (OSError, ValueError, HTTPException) as error:
        print(f"penstock top: {mask(reason(url, error))}", file=sys.stderr)
        return 1
    with _screen() if on_screen else suppress(KeyboardInterrupt):
        problem, first = "", True
        while True:
            if on_screen or not first:  # rates need two updates: without a screen, the first is not shown
                width, height = shutil.get_terminal_size()
                lines = render(history, url, width, height if on_screen else None, glyphs)
                _show([*lines, *([problem] if problem else [])], on_screen)
                if args.once:
                    return int(bool(problem))
            first = False
            if _wait(args.interval, on_screen):
                break
            try:
                history.add(fetch(url, key))
                problem = ""
            except (OSError, ValueError, HTTPException) as error:
                problem = reason(url, error)
    return 0


def _show(lines: list[str], on_screen: bool) -> None:
    text = "\n".join(lines)
    if on_screen:
        text = HOME + text.replace("\n", ERASE_LINE + "\n") + ERASE_LINE + ERASE_BELOW
    print(text, end="" if on_screen else "\n", flush=True)


@contextmanager
def _screen() -> Iterator[None]:
    """Switch to the alternate screen, with keys read without Enter; Ctrl-C leaves it."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    print(ENTER, end="", flush=True)
    try:
        if before:
            tty.setcbreak(sys.stdin)
        with suppress(KeyboardInterrupt):
            yield
    finally:
        if before:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        print(LEAVE, end="", flush=True)


def _wait(seconds: float, with_keys: bool) -> bool:
    """Wait for ``seconds``, or until q is pressed; returns True if q was pressed."""
    if not with_keys or not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], rest)[0] and os.read(sys.stdin.fileno(), 64).lower() in (b"q", b""):
            return True
    return False


def fetch(url: str, key: str) -> dict[str, Any]:
    """Request ``/web/live``. Raises ``OSError``, ``ValueError`` or ``HTTPException`` if it fails."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/').removesuffix('/v1')}/web/live", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def reason(url: str, error: Exception) -> str:
    """Describe why the request failed, and what to do."""
    if isinstance(error, urllib.error.HTTPError):
        messages = {
            401: "the server requires an API key: set --api-key or PENSTOCK_API_KEY",
            404: "this is not a Penstock server, or it runs with --no-web",
        }
        return f"{url}: {messages.get(error.code, f'the server returned status {error.code}')}"
    return f"{url} does not respond: {getattr(error, 'reason', error)}"
