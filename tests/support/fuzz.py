"""Fuzzing: mutated requests to every POST endpoint of a real server and every gRPC method, and what must hold of the
answers and afterwards.

Request number ``i`` of a seed is always the same, so that what one finds can be sent again. A fault is a status of 500
or more that is not 503, gRPC's INTERNAL or UNKNOWN, no answer in ``DEADLINE`` seconds, or a refusal in no dialect's
shape. In the end nothing may
run, wait, or hold a KV block, and the processes have the memory, files and threads that they had.
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
from fuzz_requests import BASES, KEYWORDS, REGION, Request, drawn, encoded
from serving import Served
from storm import LOOP_BLOCKED, count_resources, eventually, wait_until_idle
from tqdm import tqdm
from yarl import URL

CONNECTIONS = 8
HTTP_OF_GRPC = 5
"""Requests over HTTP for each over gRPC."""
DEADLINE = 60.0
"""Seconds in which a request is answered, or its connection closed."""
POOLS = 8
"""Threads that pools of a process may not have started yet when it is warm."""
ENOUGH = 20
"""Faults after which no more requests are sent."""
SHAPES: tuple[Callable[[dict[str, Any]], bool], ...] = (
    lambda body: isinstance(body["error"], str) and bool(body["error"]),  # Triton
    lambda body: bool(body["error"]["message"]),  # OpenAI, vLLM, Anthropic
    lambda body: body["choices"] == [] and bool(body["error_info"]["message"]),  # BladeLLM
    lambda body: bool(body["error_msg"]) and body["error_code"] >= 400,  # PaddleNLP
    lambda body: isinstance(body["message"], str) and bool(body["message"]),  # Cohere
)
"""Of refusals, by dialect."""


@dataclass
class Report:
    """What came of it."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds."""
    seconds: float = 0.0
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """MiB resident, by process, after the warm-up and in the end."""
    count_resources: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Likewise, files and threads."""
    holds: Counter[str] = field(default_factory=Counter)
    """What held an event loop: a path, and the innermost function."""
    held: list[str] = field(default_factory=list)
    """Its lines in the log."""

    @property
    def left(self) -> list[str]:
        """Which files and threads were left."""
        return [
            f"{name}: {then}, then {now}"
            for name, (then, now) in self.possessions.items()
            if now > then + (POOLS if name.startswith("threads") else 0)
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.statuses.total()} requests in {self.seconds:.1f} s, the slowest {self.slowest:.2f} s:",
            ", ".join(f"{status} {count}" for status, count in self.statuses.most_common()),
            f"memory (MiB): {self.memory}; files and threads: {self.possessions}",
            f"event loop held {self.holds.total()} times: {dict(self.holds.most_common(10))}",
        ]
        return "\n".join([*lines, *self.held[-10:], *self.faults])


class Fuzz:
    """A client with ``CONNECTIONS`` connections."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._seed = seed
        self._names: list[str] = []
        self._numbers = iter(range(0))
        self._report = Report()
        self._engine = served.pids["engine"]
        self._open: dict[int, Request] = {}

    async def run(self, count: int) -> Report:
        """Send so many requests, a fifth of them to warm up."""
        warm, begun = count // 5, time.monotonic()
        at = len(self._served.lines)
        region = SharedMemory(REGION, create=True, size=4096)
        assert region.buf
        region.buf[:4] = b"\2\0\0\0"  # the number that a base takes from there
        try:
            await self._connected(self._look())
            with tqdm(total=count, disable=count < 5000, desc=f"fuzz {self._seed}", mininterval=1) as self._bar:
                await self._connected(self._send(range(warm)))
                await wait_until_idle(self._served)
                memory, before = resident(self._served), count_resources(self._served)
                await self._connected(self._send(range(warm, count)))
            if self._report.faults:
                return self._report
            await self._connected(self._bases())
        finally:
            region.close()
            region.unlink()
        await wait_until_idle(self._served)
        report = self._report

        async def same() -> None:
            now = count_resources(self._served)
            report.possessions = {name: (before.get(name, 0), now[name]) for name in now}
            assert not report.left

        with suppress(AssertionError):
            await eventually(same)
        report.memory = {name: (memory.get(name, 0), now) for name, now in resident(self._served).items()}
        report.seconds = time.monotonic() - begun
        report.held = [line for line in self._served.lines[at:] if re.search(LOOP_BLOCKED, line)]
        report.holds = Counter(re.sub(r".*\) by (request \S+ )?| <.*", "", line) for line in report.held)
        return report

    async def _connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something with connections that are closed behind it."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._served.root, timeout=timeout) as self._session:
            await work

    async def _look(self) -> None:
        """Every POST endpoint has a base, and every base is answered."""
        async with self._session.get("/openapi.json") as got:
            document = await got.json()
        posts = [path for path, methods in document["paths"].items() if "post" in methods]
        templates = {path: re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in posts}
        without = [path for path, like in templates.items() if not any(like.fullmatch(base.path) for base in BASES)]
        assert not without, f"no base request for {without}"
        schemas = document["components"]["schemas"].values()
        self._names = [*sorted({name for schema in schemas for name in schema.get("properties", {})}), *KEYWORDS]
        await self._bases()

    async def _bases(self) -> None:
        for base in BASES:
            async with self._session.post(base.path, json=base.body, headers=base.headers) as got:
                assert got.status == base.status, (base.path, base.body, got.status, await got.text())
        await self._session.post("/v2/systemsharedmemory/region/r/register", json={"key": REGION, "byte_size": 4096})
        async with self._channel() as channel:
            await fuzz_grpc.check(channel, DEADLINE)
        await self._session.post("/v2/systemsharedmemory/unregister", json={})

    async def _send(self, numbers: range) -> None:
        self._numbers = iter(numbers)
        self._calls = iter(range(numbers.start // HTTP_OF_GRPC, numbers.stop // HTTP_OF_GRPC))
        async with self._channel() as channel:
            clients = [self._client() for _ in range(CONNECTIONS)]
            await asyncio.gather(*clients, *(self._caller(channel) for _ in range(2)))

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._served.find(r"gRPC at (\S+)")[1])

    async def _caller(self, channel: grpc.aio.Channel) -> None:
        """A client of gRPC."""
        for number in self._calls:
            if len(self._report.faults) >= ENOUGH:
                return
            call = fuzz_grpc.drawn(self._seed, number)
            status, fault = await fuzz_grpc.ask(channel, call, DEADLINE)
            if fault:
                self._report.faults.append(f"call {number}: {fault}\n  {call}")
            self._report.statuses[status] += 1
            if call.method in fuzz_grpc.SETTINGS:
                base = next(message for method, message in fuzz_grpc.BASES if method == call.method)
                await fuzz_grpc.ask(channel, fuzz_grpc.Call(call.method, [base.SerializeToString()]), DEADLINE)

    async def _client(self) -> None:
        for number in self._numbers:
            if len(self._report.faults) >= ENOUGH:
                return
            request = drawn(self._seed, number, self._names)
            self._open[number] = request
            at = time.monotonic()
            try:
                async with asyncio.timeout(request.patience or DEADLINE):
                    status, fault = await (self._ask(request) if request.raw is None else self._tell(request.raw))
            except TimeoutError:
                status, fault = ("left", "") if request.patience else ("none", f"no answer in {DEADLINE:.0f} s")
            except (aiohttp.ClientError, OSError) as error:
                status, fault = "broken", repr(error)
            if not fault and "503" in status and self._served.pids["engine"] != self._engine:
                fault = f"the engine died; open were {sorted(self._open)}"
            del self._open[number]
            if fault:
                self._report.faults.append(f"request {number}: {fault}\n  {request}")
            self._report.statuses[status] += 1
            self._report.slowest = max(self._report.slowest, time.monotonic() - at)
            if request.base.settings:
                await self._ask(Request(request.base, "POST", request.base.path, {}, encoded(request.base.body)))
            self._bar.update()

    async def _ask(self, request: Request) -> tuple[str, str]:
        """The status, and what is wrong with it."""
        url, headers = URL(self._served.root + request.path, encoded=True), {"content-type": "application/json"}
        asked = self._session.request(
            request.method, url, data=request.body, headers=headers | request.headers, allow_redirects=False
        )
        async with asked as got:
            body = await got.read()
            told = "" if request.method == "HEAD" else judged(got.status, body)
            return str(got.status), told

    async def _tell(self, raw: bytes) -> tuple[str, str]:
        """Likewise of bytes, after which nothing follows; the parser's own refusals are plain text."""
        url = URL(self._served.root)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            with suppress(OSError):  # it may have heard enough
                writer.write(raw)
                writer.write_eof()
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
        finally:
            writer.close()
        found = re.match(rb"(?:HTTP/1\.1 100 Continue\r\n\r\n)?HTTP/1\.1 (\d+)", answer)
        status = int(found[1]) if found else 0
        return f"raw {status or 'closed'}", judged(status, b"") if status >= 500 else ""


def judged(status: int, body: bytes) -> str:
    """What is wrong with an answer."""
    if status >= 500 and status != 503:
        return f"{status} {body[:300]!r}"
    if status < 400:
        return ""
    try:
        told = json.loads(body)
    except ValueError:
        return f"{status} with a body that is not JSON: {body[:300]!r}"
    for fits in SHAPES:
        with suppress(KeyError, TypeError, AttributeError):
            if fits(told):
                return ""
    return f"{status} in no dialect's shape: {body[:300]!r}"


def resident(served: Served) -> dict[str, int]:
    """MiB of each process."""
    pages = {
        f"{kind} {number}": int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
        for kind, pids in served.pids.items()
        for number, pid in enumerate(pids)
    }
    return {name: count * os.sysconf("SC_PAGE_SIZE") // 2**20 for name, count in pages.items()}
