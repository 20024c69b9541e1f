"""``penstock pd status``: show the instances of a router as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from penstock.core import Code, PenstockError

INTERVAL = 1.0
"""Seconds between two updates."""
CLEAR = "\x1b[H\x1b[2J"
"""Escape sequence that clears the terminal."""
COLUMNS = (
    "role",
    "address",
    "state",
    "running",
    "waiting",
    "KV cache",
    "prompt tokens",
    "transfers",
    "failed",
    "received",
)


def show(url: str, api_key: str, once: bool) -> int:
    """Print the table repeatedly until Ctrl-C; only once with ``once``, or if the output is not a terminal.

    Raises ``PenstockError`` if there is no router.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    while True:
        text = table(COLUMNS, [_row(instance) for instance in instances(base, api_key)])
        if once or not sys.stdout.isatty():
            print(text)
            return 0
        print(f"{CLEAR}{base}  {time.strftime('%H:%M:%S')}\n\n{text}", flush=True)
        time.sleep(INTERVAL)


def instances(base: str, api_key: str = "") -> list[dict[str, Any]]:
    """Request a router's list of instances. Raises ``PenstockError`` if there is no router."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx2.get(f"{base}/penstock/instances", headers=headers, timeout=10.0)
        result: list[dict[str, Any]] = response.raise_for_status().json()["instances"]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError) as error:
        raise PenstockError(Code.UNAVAILABLE, f"there is no router at {base}: {error}") from error
    return result


def _row(instance: dict[str, Any]) -> list[str]:
    used = f"{instance['blocks_used'] / instance['blocks']:.0%}" if instance["blocks"] else "-"
    return [
        instance["role"],
        instance["address"],
        instance["state"],
        str(instance["running"]),
        str(instance["waiting"]),
        used,
        str(instance["prompt_tokens"]),
        str(instance["kv_completed"]),
        str(instance["kv_failed"]),
        f"{instance['kv_bytes_received'] / 1e6:.1f} MB",
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns with a header."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
