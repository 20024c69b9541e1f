"""``penstock top``: what a server is doing, in the terminal, again and again."""

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

from ..screen import can_print, has_escapes
from .view import ASCII, BLOCKS, History, render

TIMEOUT = 10.0
"""Seconds that a server has to answer."""
HOME = "\033[H"
ENTER, LEAVE = "\033[?1049h\033[?25l\033[2J", "\033[?25h\033[?1049l"
"""To the alternate screen without a cursor, and back."""
ERASE_LINE, ERASE_BELOW = "\033[K", "\033[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of a Penstock server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", dest="key", metavar="KEY", help="(default: the environment's PENSTOCK_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look twice, print once, and end")


def run(args: argparse.Namespace) -> int:
    """Until q or Ctrl-C. Returns 1 where the server does not answer at first."""
    if args.interval <= 0:
        raise invalid("interval", "must be above 0 seconds", 0)
    key = args.key or os.environ.get("PENSTOCK_API_KEY", "").split(",")[0]
    history, on_screen = History(), has_escapes() and not args.once
    glyphs = BLOCKS if can_print("".join(BLOCKS)) else ASCII
    try:
        history.add(ask(args.url, key))
    except (OSError, ValueError, HTTPException) as error:
        print(f"penstock top: {mask(reason(args.url, error))}", file=sys.stderr)
        return 1
    with _screen() if on_screen else suppress(KeyboardInterrupt):
        problem, first = "", True
        while True:
            if on_screen or not first:  # rates need two looks; a screen shows the first one meanwhile
                width, height = shutil.get_terminal_size()
                lines = render(history, args.url, width, height if on_screen else None, glyphs)
                _show([*lines, *([problem] if problem else [])], on_screen)
                if args.once:
                    return int(bool(problem))
            first = False
            if _wait(args.interval, on_screen):
                break
            try:
                history.add(ask(args.url, key))
                problem = ""
            except (OSError, ValueError, HTTPException) as error:
                problem = reason(args.url, error)
    return 0


def _show(lines: list[str], on_screen: bool) -> None:
    text = "\n".join(lines)
    if on_screen:
        text = HOME + text.replace("\n", ERASE_LINE + "\n") + ERASE_LINE + ERASE_BELOW
    print(text, end="" if on_screen else "\n", flush=True)


@contextmanager
def _screen() -> Iterator[None]:
    """The alternate screen, with keys that are read as they are pressed; Ctrl-C leaves it."""
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
    """Wait; whether q was pressed."""
    if not with_keys or not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], rest)[0] and os.read(sys.stdin.fileno(), 64).lower() in (b"q", b""):
            return True
    return False


def ask(url: str, key: str) -> dict[str, Any]:
    """The answer of ``/web/live``. Raises ``OSError``, ``ValueError`` or ``HTTPException`` where there is none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/').removesuffix('/v1')}/web/live", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def reason(url: str, error: Exception) -> str:
    """Why a server cannot be watched, and what to do."""
    if isinstance(error, urllib.error.HTTPError):
        words = {
            401: "it asks for an API key: give --api-key, or PENSTOCK_API_KEY",
            404: "it is no Penstock server, or one with --no-web",
        }
        return f"{url}: {words.get(error.code, f'it answers {error.code}')}"
    return f"{url} does not answer: {getattr(error, 'reason', error)}"
