"""Attacks: what one client does to harm the others, and a client beside it whose streams must not notice."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from serving import Served

BODY = {
    "prompt": "The story of the sea:",
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,  # an event for each token, whatever its text
}


class Victim:
    """Another client: asks for the same stream again and again until it is left, from a thread of its own.

    Leaving asserts that every stream was whole and said the same as the first, which was alone.

    Args:
        headers: of its requests.
    """

    def __init__(self, served: Served, headers: dict[str, str] | None = None) -> None:
        self._address = served.root.rpartition("/")[2]
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._leaving = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._errors: list[str] = []
        self.streams = 0
        """How many ended beside the attack."""
        self.gap = 0.0
        """Seconds of the longest pause between two tokens of a stream."""

    def __enter__(self) -> Self:
        self._right = self._ask()
        self.gap = 0.0
        self._thread.start()
        assert self._begun.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._thread.join(120)
        if kind is None:
            assert not self._thread.is_alive(), "its stream does not end"
            assert not self._errors, self._errors
            assert self.streams

    def _run(self) -> None:
        while not self.streams or not self._leaving.is_set():
            try:
                heard = self._ask()
            except (OSError, http.client.HTTPException, ValueError, KeyError, AssertionError) as error:
                self._errors.append(f"after {self.streams} streams: {error!r}")
                self._begun.set()
                return
            self.streams += 1
            if heard != self._right:
                self._errors.append(f"stream {self.streams} says something else")

    def _ask(self) -> list[Any]:
        """One stream: its token ids, its text and its reason to end."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        ids: list[int] = []
        text, reason = "", None
        try:
            connection.request("POST", "/v1/completions", json.dumps(BODY), self._headers)
            got = connection.getresponse()
            assert got.status == 200, got.read()
            last = None
            for line in got:
                if line == b"data: [DONE]\n":
                    return [ids, text, reason]
                if not line.startswith(b"data: "):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                now = time.monotonic()
                self.gap, last = max(self.gap, now - (last or now)), now
                self._begun.set()
                ids += choice["token_ids"]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
        finally:
            connection.close()
        raise AssertionError(f"the stream ended after {len(ids)} tokens")


def peak_memory(pid: int) -> int:
    """MiB that a process has had at most, resident."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
