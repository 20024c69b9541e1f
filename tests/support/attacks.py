"""A client that checks its streams while another client attacks the server."""

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
    "return_token_ids": True,  # one event per token, even if it has no text
}


class Victim:
    """Context manager that requests the same stream repeatedly, in a thread.

    At its end, it asserts that every stream was complete and equal to the first one, which ran without an attack.

    Args:
        headers: additional headers of the requests.
    """

    def __init__(self, served: Served, headers: dict[str, str] | None = None) -> None:
        self._address = served.root.rpartition("/")[2]
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._errors: list[str] = []
        self.streams = 0
        """Number of streams that ended during the attack."""
        self.gap = 0.0
        """Seconds of the longest pause between two tokens of a stream."""

    def __enter__(self) -> Self:
        self._expected = self._read_stream()
        self.gap = 0.0
        self._thread.start()
        assert self._begun.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(120)
        if kind is None:
            assert not self._thread.is_alive(), "the last stream did not end in time"
            assert not self._errors, self._errors
            assert self.streams

    def _run(self) -> None:
        while not self.streams or not self._stop.is_set():
            try:
                found = self._read_stream()
            except (OSError, http.client.HTTPException, ValueError, KeyError, AssertionError) as error:
                self._errors.append(f"after {self.streams} streams: {error!r}")
                self._begun.set()
                return
            self.streams += 1
            if found != self._expected:
                self._errors.append(f"stream {self.streams} differs from the first")

    def _read_stream(self) -> list[Any]:
        """Token ids, text and finish reason of one stream."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        ids: list[int] = []
        text, reason = "", None
        try:
            connection.request("POST", "/v1/completions", json.dumps(BODY), self._headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            last = None
            for line in response:
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
    """Peak resident memory of a process, MiB."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
