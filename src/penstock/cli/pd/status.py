"""``penstock pd status``: show the instances of a router as a table."""

from __future__ import annotations

import time
from typing import Any

import httpx2

from penstock.core import Code, PenstockError

from ..screen import has_escapes
from ..table import table

INTERVAL = 1.0
"""Seconds between two updates."""
CLEAR = "\x1b[H\x1b[2J"
"""Escape sequence that clears the terminal."""
COLUMNS = (
    "ROLE",
    "ADDRESS",
    "STATE",
    "RUNNING",
    "WAITING",
    "KV CACHE",
    "PROMPT TOKENS",
    "TRANSFERS",
    "FAILED",
    "RECEIVED",
)


def show(url: str, api_key: str, once: bool) -> int:
    """Print the table repeatedly until Ctrl-C; only once with ``once``, or if the output is not a terminal with escape
    sequences.

    Raises ``PenstockError`` if there is no router.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    while True:
        text = "\n".join(table(COLUMNS, [_row(instance) for instance in instances(base, api_key)]))
        if once or not has_escapes():
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
