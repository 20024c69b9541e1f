"""Fuzzing: mutated requests to every POST endpoint and every gRPC method of a real server.

Request number ``i`` of a seed is always the same, so that it can be repeated. A fault is a status of 500 or more except
503, gRPC's INTERNAL or UNKNOWN, no response within ``DEADLINE`` seconds, or an error that is in no dialect's format. At
the end no request may be running or waiting, no KV block may be in use, and the processes must have as much memory, and
as many files and threads as at the beginning.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import aiohttp
import fuzz_grpc
import grpc
from fuzz_requests import BASES, KEYWORDS, REGION, Request, draw_request, encode
from serving import Served
from storm import LOOP_BLOCKED, count_resources, eventually, wait_until_idle
from tqdm import tqdm
from yarl import URL

CONNECTIONS = 8
HTTP_PER_GRPC = 5
"""Number of HTTP requests for each gRPC call."""
DEADLINE = 60.0
"""Seconds within which a request must be answered, or its connection closed."""
UNSTARTED_THREADS = 8
"""Number of threads that a process may start after the warm-up."""
MAX_FAULTS = 20
"""Number of faults after which no more requests are sent."""
ERROR_SHAPES: tuple[Callable[[dict[str, Any]], bool], ...] = (
    lambda body: isinstance(body["error"], str) and bool(body["error"]),  # Triton
    lambda body: bool(body["error"]["message"]),  # OpenAI, vLLM, Anthropic
    lambda body: body["choices"] == [] and bool(body["error_info"]["message"]),  # BladeLLM
    lambda body: bool(body["error_msg"]) and body["error_code"] >= 400,  # PaddleNLP
    lambda body: isinstance(body["message"], str) and bool(body["message"]),  # Cohere
)
"""Checks of an error body, one per API's format."""


@dataclass
class Report:
    """Results of a fuzzing run."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds of the slowest request."""
    seconds: float = 0.0
    """Seconds of the whole run."""
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Resident memory by process, MiB: after the warm-up and at the end."""
    resources: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of open files and threads by kind of process: after the warm-up and at the end."""
    blocks: Counter[str] = field(default_factory=Counter)
    """Number of times that an event loop was blocked, by path and innermost function."""
    block_lines: list[str] = field(default_factory=list)
    """Log lines that report the blocked event loops of ``blocks``."""

    @property
    def leaks(self) -> list[str]:
        """Descriptions of leaked files and threads."""
        return [
            f"{name}: {then}, then {now}"
            for name, (then, now) in self.resources.items()
            if now > then + (UNSTARTED_THREADS if name.startswith("threads") else 0)
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.statuses.total()} requests in {self.seconds:.1f} s, the slowest {self.slowest:.2f} s:",
            ", ".join(f"{status} {count}" for status, count in self.statuses.most_common()),
            f"memory (MiB): {self.memory}; files and threads: {self.resources}",
            f"event loop blocked {self.blocks.total()} times: {dict(self.blocks.most_common(10))}",
        ]
        return "\n".join([*lines, *self.block_lines[-10:], *self.faults])


class Fuzzer:
    """Client that sends mutated requests over ``CONNECTIONS`` HTTP connections and a gRPC channel."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._seed = seed
        self._names: list[str] = []
        self._numbers = iter(range(0))
        self._report = Report()
        self._engine = served.pids["engine"]
        self._open: dict[int, Request] = {}

    async def run(self, count: int) -> Report:
        """Send ``count`` requests, the first fifth of them as a warm-up."""
        warm_up, begun = count // 5, time.monotonic()
        first_line = len(self._served.lines)
        region = SharedMemory(REGION, create=True, size=4096)
        assert region.buf
        region.buf[:4] = b"\2\0\0\0"  # the output length that a base request reads from shared memory
        try:
            await self._with_session(self._check_bases())
            with tqdm(total=count, disable=count < 5000, desc=f"fuzz {self._seed}", mininterval=1) as self._bar:
                await self._with_session(self._send_range(range(warm_up)))
                await wait_until_idle(self._served)
                memory, before = resident_memory(self._served), count_resources(self._served)
                await self._with_session(self._send_range(range(warm_up, count)))
            if self._report.faults:
                return self._report
            await self._with_session(self._send_bases())
        finally:
            region.close()
            region.unlink()
        await wait_until_idle(self._served)
        report = self._report

        async def no_leaks() -> None:
            now = count_resources(self._served)
            report.resources = {name: (before.get(name, 0), now[name]) for name in now}
            assert not report.leaks

        with suppress(AssertionError):
            await eventually(no_leaks)
        report.memory = {name: (memory.get(name, 0), now) for name, now in resident_memory(self._served).items()}
        report.seconds = time.monotonic() - begun
        report.block_lines = [line for line in self._served.lines[first_line:] if re.search(LOOP_BLOCKED, line)]
        report.blocks = Counter(re.sub(r".*\) by (request \S+ )?| <.*", "", line) for line in report.block_lines)
        return report

    async def _with_session(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` with ``self._session``, which is closed afterwards."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._served.root, timeout=timeout) as self._session:
            await work

    async def _check_bases(self) -> None:
        """Assert that every POST endpoint has a base request, and that the base requests are answered as expected."""
        async with self._session.get("/openapi.json") as response:
            document = await response.json()
        posts = [path for path, methods in document["paths"].items() if "post" in methods]
        patterns = {path: re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in posts}
        missing = [path for path, regex in patterns.items() if not any(regex.fullmatch(base.path) for base in BASES)]
        assert not missing, f"no base request for {missing}"
        schemas = document["components"]["schemas"].values()
        self._names = [*sorted({name for schema in schemas for name in schema.get("properties", {})}), *KEYWORDS]
        await self._send_bases()

    async def _send_bases(self) -> None:
        for base in BASES:
            async with self._session.post(base.path, json=base.body, headers=base.headers) as response:
                assert response.status == base.status, (base.path, base.body, response.status, await response.text())
        await self._session.post("/v2/systemsharedmemory/region/r/register", json={"key": REGION, "byte_size": 4096})
        async with self._channel() as channel:
            await fuzz_grpc.check(channel, DEADLINE)
        await self._session.post("/v2/systemsharedmemory/unregister", json={})

    async def _send_range(self, numbers: range) -> None:
        self._numbers = iter(numbers)
        self._calls = iter(range(numbers.start // HTTP_PER_GRPC, numbers.stop // HTTP_PER_GRPC))
        async with self._channel() as channel:
            clients = [self._http_client() for _ in range(CONNECTIONS)]
            await asyncio.gather(*clients, *(self._grpc_client(channel) for _ in range(2)))

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._served.find(r"gRPC at (\S+)")[1])

    async def _grpc_client(self, channel: grpc.aio.Channel) -> None:
        for number in self._calls:
            if len(self._report.faults) >= MAX_FAULTS:
                return
            call = fuzz_grpc.draw_call(self._seed, number)
            status, fault = await fuzz_grpc.send(channel, call, DEADLINE)
            if fault:
                self._report.faults.append(f"call {number}: {fault}\n  {call}")
            self._report.statuses[status] += 1
            if call.method in fuzz_grpc.SETTINGS:
                base = next(message for method, message in fuzz_grpc.BASES if method == call.method)
                await fuzz_grpc.send(channel, fuzz_grpc.Call(call.method, [base.SerializeToString()]), DEADLINE)

    async def _http_client(self) -> None:
        for number in self._numbers:
            if len(self._report.faults) >= MAX_FAULTS:
                return
            request = draw_request(self._seed, number, self._names)
            self._open[number] = request
            begun = time.monotonic()
            try:
                async with asyncio.timeout(request.timeout or DEADLINE):
                    status, fault = await self._send(request)
            except TimeoutError:
                status, fault = ("left", "") if request.timeout else ("none", f"no response in {DEADLINE:.0f} s")
            except (aiohttp.ClientError, OSError) as error:
                status, fault = "broken", repr(error)
            if not fault and "503" in status and self._served.pids["engine"] != self._engine:
                fault = f"the engine was restarted; open requests: {sorted(self._open)}"
            del self._open[number]
            if fault:
                self._report.faults.append(f"request {number}: {fault}\n  {request}")
            self._report.statuses[status] += 1
            self._report.slowest = max(self._report.slowest, time.monotonic() - begun)
            if request.base.settings:
                await self._send(Request(request.base, "POST", request.base.path, {}, encode(request.base.body)))
            self._bar.update()

    async def _send(self, request: Request) -> tuple[str, str]:
        """Send a request; return the status of the response, and its fault (empty: no fault)."""
        if request.raw is not None:
            return await self._send_raw(request.raw)
        url, headers = URL(self._served.root + request.path, encoded=True), {"content-type": "application/json"}
        sending = self._session.request(
            request.method, url, data=request.body, headers=headers | request.headers, allow_redirects=False
        )
        async with sending as response:
            body = await response.read()
            fault = "" if request.method == "HEAD" else find_fault(response.status, body)
            return str(response.status), fault

    async def _send_raw(self, raw: bytes) -> tuple[str, str]:
        """Send bytes and EOF; return the status of the response, and its fault (empty: no fault). The body is not
        checked: errors of the HTTP parser are plain text."""
        url = URL(self._served.root)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            with suppress(OSError):  # the server may have closed the connection
                writer.write(raw)
                writer.write_eof()
            try:
                response = await reader.read()
            except ConnectionError:
                response = b""
        finally:
            writer.close()
        found = re.match(rb"(?:HTTP/1\.1 100 Continue\r\n\r\n)?HTTP/1\.1 (\d+)", response)
        status = int(found[1]) if found else 0
        return f"raw {status or 'closed'}", find_fault(status, b"") if status >= 500 else ""


def find_fault(status: int, body: bytes) -> str:
    """Description of the fault of a response; empty if there is no fault."""
    if status >= 500 and status != 503:
        return f"{status} {body[:300]!r}"
    if status < 400:
        return ""
    try:
        document = json.loads(body)
    except ValueError:
        return f"{status} with a body that is not JSON: {body[:300]!r}"
    for matches in ERROR_SHAPES:
        with suppress(KeyError, TypeError, AttributeError):
            if matches(document):
                return ""
    return f"{status} in no dialect's error format: {body[:300]!r}"


def resident_memory(served: Served) -> dict[str, int]:
    """Resident memory of each process, MiB."""
    pages = {
        f"{kind} {number}": int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
        for kind, pids in served.pids.items()
        for number, pid in enumerate(pids)
    }
    return {name: count * os.sysconf("SC_PAGE_SIZE") // 2**20 for name, count in pages.items()}
