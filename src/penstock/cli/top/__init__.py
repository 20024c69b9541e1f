"""``penstock top``: what a server is doing, in the terminal, again and again."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from penstock.core.errors import invalid

from .view import History, render

TIMEOUT = 10.0
"""Seconds that a server has to answer."""
CLEAR, HOME = "\033[2J", "\033[H"
ERASE_LINE, ERASE_BELOW = "\033[K", "\033[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of a Penstock server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", dest="key", metavar="KEY", help="(default: the environment's PENSTOCK_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look twice, print once, and end")


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C. Returns 1 where the server does not answer at first."""
    if args.interval <= 0:
        raise invalid("interval", "must be above 0 seconds", 0)
    key = args.key or os.environ.get("PENSTOCK_API_KEY", "").split(",")[0]
    history, on_terminal = History(), sys.stdout.isatty() and not args.once
    try:
        history.add(ask(args.url, key))
    except (OSError, ValueError, HTTPException) as error:
        print(f"penstock top: {reason(args.url, error)}", file=sys.stderr)
        return 1
    if on_terminal:
        print(CLEAR, end="")
    while True:
        time.sleep(args.interval)
        try:
            history.add(ask(args.url, key))
            problem = ""
        except (OSError, ValueError, HTTPException) as error:
            problem = reason(args.url, error)
        width, height = shutil.get_terminal_size()
        lines = render(history, args.url, width, height if on_terminal else None)
        text = "\n".join([*lines, *([problem] if problem else [])])
        if on_terminal:
            print(HOME + text.replace("\n", ERASE_LINE + "\n") + ERASE_LINE + ERASE_BELOW, end="", flush=True)
        else:
            print(text, flush=True)
        if args.once:
            return int(bool(problem))


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
