"""Reliability scenarios for disaggregated prefill and decode: clients send requests to routers while instances are
killed, stopped, cut off from the network, or out of KV blocks."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
from kv_proxy import Fault, KVProxy
from namespaces import Namespaces
from serving import Served, free_ports, processes
from storm import eventually, read_metrics

KV_TIMEOUT = 3.0
ENGINE_TIMEOUT = 6.0
"""Value of ``--engine-iteration-timeout`` in seconds."""
DEADLINE = 60.0
"""Seconds after which a request counts as lost."""
COMMON_OPTIONS = (
    "--kv-timeout",
    str(KV_TIMEOUT),
    "--engine-iteration-timeout",
    str(ENGINE_TIMEOUT),
)
SERVER_OPTIONS = ("--num-gpu-blocks-override", "120")
ROUTER_OPTIONS = ("--pd-min-prefill-tokens", "32")
SLOT_BYTES = "196608"
"""``--kv-buffer-size`` for one slot of the built-in model, in bytes."""
IDLE_METRICS = ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "kv_transfer_slots_used")
"""Metrics of an instance that are zero without requests."""
TRANSFER = r"transfer \w+: \d+ tokens"
"""Pattern of the log message of an instance that takes part in a KV transfer."""


class Outcome(StrEnum):
    RIGHT = "right"  # the answer equals the answer of a single instance
    ERROR = "error"  # the response has an error status, or the stream an error event
    BROKEN = "broken"  # the connection broke or was refused
    WRONG = "wrong"
    LOST = "lost"  # the deadline passed, or the stream had no last event


class Reply(NamedTuple):
    """Outcome of one request."""

    outcome: Outcome
    sent: float
    """Time at which the request was sent (``time.monotonic``)."""
    ended: float
    message: str = ""
    """Error message, or description of the difference from the expected answer."""
    longest_pause: float = 0.0
    """Seconds of the longest pause between two events of the stream."""


class Question(NamedTuple):
    """A request. Its expected answer is the answer of a single instance."""

    path: str
    body: dict[str, Any]


Answer = tuple[str, str]
"""Text and finish reason of an answer."""
Right = dict[int, tuple[Question, Answer]]
"""Questions with their expected answers."""


def questions(count: int) -> list[Question]:
    """Requests of several dialects, with and without streaming, greedy and sampled. Every prompt needs at least two
    slots."""
    topics = ("the sea", "a fox", "bread", "the moon", "两只狐狸", "a harbour", "winter", "a clock")
    requests = []
    for i in range(count):
        text = f"Number {i // 2}: a story about {topics[i % len(topics)]}, its friends and its days. " * (8 + i % 6)
        sampling: dict[str, Any] = {"temperature": 0} if i % 3 else {"temperature": 0.9, "seed": i}
        tokens, stream = (4, 40, 160)[i % 3], i % 2 == 0
        common = {**sampling, "ignore_eos": True, "stream": stream}
        chat = [{"role": "user", "content": text}]
        requests.append(
            (
                Question("/v1/completions", {"prompt": text, "max_tokens": tokens, **common}),
                Question("/v1/chat/completions", {"messages": chat, "max_tokens": tokens, **common}),
                Question("/generate", {"prompt": text, "max_tokens": tokens, **common}),
                Question("/v1/responses", {"input": text, "max_output_tokens": tokens, **common}),
                Question("/v1/messages", {"messages": chat, "max_tokens": tokens, "temperature": 0, "stream": stream}),
            )[i % 5]
        )
    return requests


# --- Clients ----------------------------------------------------------------------------------------------------------


class ServerError(Exception):
    """The server returned an error."""


class PauseMeter:
    """Measures the pauses between the events of a stream."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds of the longest pause so far."""
        self._last: float | None = None

    def record_event(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
        self._last = now


class CutShortError(Exception):
    """A stream ended without a last event. ``str`` returns the text received so far."""


class Client:
    """Client that opens a connection for each request."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._salts = itertools.count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def answer(self, root: str, question: Question, meter: PauseMeter | None = None) -> Answer:
        """Send a request and return its answer. Raises ``ServerError``, ``CutShortError`` and errors of aiohttp.

        Args:
            meter: measures the pauses of a stream.
        """
        body = dict(question.body)
        if question.path != "/v1/messages":
            body["cache_salt"] = f"{os.getpid()} {next(self._salts)}"  # prevents hits: the KV cache is transferred
        async with self._session.post(root + question.path, json=body) as response:
            if response.status != 200:
                raise ServerError(f"{response.status}: {_message(json.loads(await response.read()))}")
            if not body["stream"]:
                return _parse_response(json.loads(await response.read()), body)
            return await _read_stream(response, body, meter or PauseMeter())

    async def send(self, root: str, question: Question, expected: Answer) -> Reply:
        """Send a request and compare its answer with the expected one."""
        sent, meter = time.monotonic(), PauseMeter()

        def reply(outcome: Outcome, message: str = "") -> Reply:
            return Reply(outcome, sent, time.monotonic(), message, meter.longest)

        try:
            async with asyncio.timeout(DEADLINE):
                found = await self.answer(root, question, meter)
        except TimeoutError:
            return reply(Outcome.LOST, f"no complete response within {DEADLINE:.0f} s: {question.path}")
        except CutShortError as error:
            return reply(Outcome.LOST, f"the stream ended without a last event: {question.path} {error}")
        except ServerError as error:
            return reply(Outcome.ERROR, str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            return reply(Outcome.BROKEN, repr(error))
        except (ValueError, KeyError) as error:
            return reply(Outcome.WRONG, f"malformed response: {error!r}")
        if found == expected:
            return reply(Outcome.RIGHT)
        return reply(Outcome.WRONG, f"{question.path}: {found}, not {expected}")


def _message(document: dict[str, Any]) -> str:
    error = document.get("error", document)
    return str(error["message"] if isinstance(error, dict) else error)


def _parse_response(document: dict[str, Any], body: dict[str, Any]) -> Answer:
    if "choices" in document:
        (choice,) = document["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]
    if "output" in document:
        if document["status"] == "failed":
            raise ServerError(_message(document))
        return document["output"][-1]["content"][0]["text"], document["status"]
    if "content" in document:
        return "".join(block["text"] for block in document["content"]), document["stop_reason"]
    (text,) = document["text"]
    return text.removeprefix(body["prompt"]), ""


async def _read_stream(response: aiohttp.ClientResponse, body: dict[str, Any], meter: PauseMeter) -> Answer:
    text, reason, ended = "", None, False
    async for event in _events(response):
        meter.record_event()
        if event.get("error") or event.get("type") == "error":
            raise ServerError(_message(event))
        match event:
            case {"end": True}:
                ended = True
            case {"choices": [choice]}:
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                reason = choice["finish_reason"] or reason
            case {"type": "response.output_text.delta" | "content_block_delta", "delta": delta}:
                text += delta if isinstance(delta, str) else delta["text"]
            case {"type": "response.failed", "response": response}:
                raise ServerError(_message(response))
            case {"type": "response.completed" | "response.incomplete", "response": {"status": status}}:
                reason, ended = status, True
            case {"type": "message_delta", "delta": {"stop_reason": suspend}}:
                reason = suspend
            case {"type": "message_stop"}:
                ended = True
            case {"text": [so_far]} if "type" not in event:
                text, reason = so_far.removeprefix(body["prompt"]), ""
    if reason != "" and not (reason and ended):
        raise CutShortError(repr(text))
    return text, reason


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        for part in line.split(b"\0"):
            data = part.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                yield {"end": True}
            elif data.startswith(b"{"):
                yield json.loads(data)


class Load:
    """Clients that send requests until ``end``. A client without a right answer uses another router next.

    Args:
        roots: URLs of the routers.
        right: the questions with their expected answers.
        pause: seconds between two requests of a client.
    """

    def __init__(self, roots: Sequence[str], right: Right, clients: int, pause: float = 0.0) -> None:
        self.replies: list[Reply] = []
        self._roots, self._right, self._pause = roots, right, pause
        self._numbers = itertools.count()
        self._ended = False
        self._more = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._run_client(number)) for number in range(clients)]

    async def _run_client(self, router: int) -> None:
        async with Client() as client:
            while not self._ended:
                question, expected = self._right[next(self._numbers) % len(self._right)]
                reply = await client.send(self._roots[router % len(self._roots)], question, expected)
                self.replies.append(reply)
                router += reply.outcome is not Outcome.RIGHT
                async with self._more:
                    self._more.notify_all()
                await asyncio.sleep(self._pause if reply.outcome is Outcome.RIGHT else 0.1)

    async def probe(self) -> float:
        """Send a short question four times a second, to each router in turn, until one is answered right; return the
        time of that answer."""
        short = min(self._right, key=lambda number: len(self._right[number][1][0]))
        probes: list[asyncio.Task[Reply]] = []
        async with Client() as client:
            while True:
                root = self._roots[len(probes) % len(self._roots)]
                probes.append(asyncio.create_task(client.send(root, *self._right[short])))
                await asyncio.sleep(0.25)
                replies = [probe.result() for probe in probes if probe.done()]
                if right := [reply.ended for reply in replies if reply.outcome is Outcome.RIGHT]:
                    self.replies += await asyncio.gather(*probes)
                    return min(right)

    async def right_since(self, start: float, count: int = 1) -> float:
        """Wait until ``count`` requests sent since ``start`` were answered right; return the time of the last of these
        answers."""

        def found() -> list[float]:
            right = (reply for reply in self.replies if reply.outcome is Outcome.RIGHT and reply.sent >= start)
            return sorted(reply.ended for reply in right)

        async with asyncio.timeout(120), self._more:
            await self._more.wait_for(lambda: len(found()) >= count)
        return found()[count - 1]

    async def end(self) -> list[Reply]:
        self._ended = True
        await asyncio.gather(*self._tasks)
        return self.replies


# --- The deployment ---------------------------------------------------------------------------------------------------


class Instance:
    """A router or an instance that can be restarted with the same options."""

    def __init__(self, role: str, flags: Sequence[str], place: Callable[[], AbstractContextManager[None]]) -> None:
        self.role, self._flags, self._place = role, flags, place
        self.start()

    def start(self) -> None:
        with self._place():
            self.served = Served("--role", self.role, *self._flags)

    @property
    def engine(self) -> int:
        engine: int = self.served.pids["engine"][0]
        return engine

    def kill(self, *pids: int) -> None:
        """Kill (-9) these processes; by default the supervisor, with which all processes of the server end."""
        for pid in pids or (self.served.pid,):
            os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Kill the remaining processes of the server, and start the server again."""
        self.served.kill()
        self.start()
        self.served.start()

    def replace(self) -> None:
        """Stop the server with SIGTERM, and start it again."""
        self.served.terminate()
        assert self.served.ended() == 0, "\n".join(self.served.lines[-50:])
        self.restart()

    def count_resources(self) -> Counter[str]:
        """Number of processes, and maximum numbers of open files by type and kind of process."""
        served = self.served
        found = Counter(processes=len(processes(served.pid)))
        for kind, pids in {"supervisor": [served.pid], **served.pids}.items():
            for pid in pids:
                found |= Counter({f"{name} of {kind}": count for name, count in _files(pid).items()})
        return found


def _files(pid: int) -> Counter[str]:
    """Number of open files of a process by type: sockets, pipes, shared memory and others."""
    found: Counter[str] = Counter()
    for descriptor in (Path("/proc") / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            found[target.partition(" ")[0] if "memfd" in target else target.partition(":")[0]] += 1
    return Counter({"files" if name.startswith("/") and "memfd" not in name else name: n for name, n in found.items()})


class Deployment:
    """Routers, prefill and decode instances with the built-in model, all ready within the context.

    Args:
        folder: folder for the cluster secret.
        prefill_flags, decode_flags: additional options of all instances of a role.
        fault: fault of the network between decode and prefill instances; None: no proxy.
        machines: network namespaces: the first for the routers, and another one for each instance; None: one host.
    """

    def __init__(
        self,
        folder: Path,
        prefill: int = 1,
        decode: int = 1,
        routers: int = 1,
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        fault: Fault | None = None,
        machines: Namespaces | None = None,
    ) -> None:
        self.machines = machines
        secret = folder / "secret"
        secret.write_text("of this deployment alone")
        secret.chmod(0o600)
        common = ("--cluster-secret-file", str(secret), *COMMON_OPTIONS)
        self._stack = ExitStack()
        self.instances: list[Instance] = []
        self.proxies: list[KVProxy] = []
        ports = free_ports(routers)
        addresses = [f"{self._host(0)}:{port}" for port in ports]
        self.routers: list[Instance] = []
        for port in ports:
            self.routers.append(self._instance("router", 0, *ROUTER_OPTIONS, *common, "--port", str(port)))
        options = (*common, *SERVER_OPTIONS, "--router-address", ",".join(addresses))
        for i in range(prefill):
            proxy_options: tuple[str, ...] = ()
            if fault:
                (port,) = free_ports(1)
                self.proxies.append(KVProxy(f"127.0.0.1:{port}", fault, i))
                proxy_options = ("--kv-port", str(port), "--kv-advertised-address", self.proxies[-1].address)
            self.instances.append(self._instance("prefill", 1 + i, *options, *proxy_options, *prefill_flags))
        transport = ("--kv-transport", "tcp") if fault or machines else ()
        for i in range(decode):
            self.instances.append(self._instance("decode", 1 + prefill + i, *options, *transport, *decode_flags))

    def _host(self, node: int) -> str:
        return self.machines.addresses[node] if self.machines else "127.0.0.1"

    def _instance(self, role: str, node: int, *flags: str) -> Instance:
        def place() -> AbstractContextManager[None]:
            return self.machines.inside(node) if self.machines else nullcontext()

        instance = Instance(role, (*flags, "--host", self._host(node)), place)
        self._stack.callback(lambda: instance.served.kill())
        return instance

    def __enter__(self) -> Self:
        try:
            for server in [*self.instances, *self.routers]:
                server.served.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        with self._stack:
            for proxy in self.proxies:
                proxy.close()
            if error[0] is None:
                for server in [*self.routers, *self.instances]:
                    server.served.terminate()
                    assert server.served.ended() == 0, "\n".join(server.served.lines[-50:])

    def with_role(self, role: str) -> list[Instance]:
        return [instance for instance in self.instances if instance.role == role]

    @property
    def roots(self) -> list[str]:
        """URLs of the routers."""
        return [router.served.root for router in self.routers]

    async def ready(self) -> None:
        """Wait until every router lists exactly these instances, all ready."""
        expected = sorted((instance.role, "ready") for instance in self.instances)

        async def check() -> None:
            async with aiohttp.ClientSession() as session:
                for root in self.roots:
                    async with session.get(f"{root}/penstock/instances") as response:
                        instances = (await response.json())["instances"]
                    found = [(instance["role"], instance["state"]) for instance in instances]
                    assert sorted(found) == expected, found

        await eventually(check)

    async def wait_until_idle(self) -> None:
        """Wait until no instance has a request, and all KV blocks and transfer buffer slots are free."""

        async def check() -> None:
            for instance in self.instances:
                found = await read_metrics(instance.served)
                left = {name: found[f"penstock:{name}"] for name in IDLE_METRICS if found[f"penstock:{name}"]}
                assert not left, (instance.role, left)
                assert found["penstock:kv_blocks"] > 0 < found["penstock:kv_transfer_slots"]
            for router in self.routers:
                assert not (await read_metrics(router.served))["penstock:num_requests_open"]

        await eventually(check)

    async def decode_metric(self, name: str) -> float:
        """Sum of a metric over the decode instances."""
        return sum([(await read_metrics(each.served))[f"penstock:{name}"] for each in self.with_role("decode")])


# --- Faults -----------------------------------------------------------------------------------------------------------


@dataclass
class FaultResult:
    """Outcomes of the requests before, during and after a fault."""

    replies: list[Reply] = field(default_factory=list)
    answered: float = 0.0
    """Seconds from the beginning of the fault until a request sent after it was answered right."""
    repaired: float | None = None
    """Seconds from the end of the fault, or from a kill, until the affected instance took part in an answer again."""
    transfers: float = 0.0
    """Number of completed KV transfers, without those of killed decode instances."""

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(reply.outcome for reply in self.replies)

    @property
    def longest_pause(self) -> float:
        """Seconds of the longest pause of a stream that was answered right."""
        return max((reply.longest_pause for reply in self.replies if reply.outcome is Outcome.RIGHT), default=0.0)

    def assert_none(self, *outcomes: Outcome) -> None:
        """Assert that no request had one of these outcomes, or was lost or answered wrongly."""
        bad = {Outcome.LOST, Outcome.WRONG, *outcomes}
        found = [reply for reply in self.replies if reply.outcome in bad]
        assert not found, (self.counts, found[:5])


Act = Callable[[], Awaitable[None]]


LATE_RESOURCES = Counter({"processes": 1, "socket of engine": 1})
"""Resources of the grammar compiler process, which an engine starts when it has been idle for some time."""


async def right_answers(root: str, questions: Iterable[Question]) -> Right:
    """Answers of a single instance to the questions."""
    async with Client() as client:
        return {i: (question, await client.answer(root, question)) for i, question in enumerate(questions)}


@asynccontextmanager
async def under_load(
    deployment: Deployment, right: Right, clients: int, pause: float
) -> AsyncIterator[tuple[Load, FaultResult]]:
    """Context in which clients send requests. At its end, asserts that all resources are released."""
    result = FaultResult()
    await deployment.ready()
    warm_up = Load(deployment.roots, right, clients, pause)  # opens all connections between servers
    await warm_up.right_since(0.0, 3 * clients)
    await warm_up.end()
    await deployment.wait_until_idle()
    servers = [*deployment.routers, *deployment.instances]
    before = [server.count_resources() for server in servers]
    completed = await deployment.decode_metric("kv_transfer_completed_total")
    load = Load(deployment.roots, right, clients, pause)
    await load.right_since(0.0, clients)
    yield load, result
    await load.right_since(time.monotonic(), clients)
    result.replies = await load.end()
    await deployment.ready()
    await deployment.wait_until_idle()
    result.transfers = await deployment.decode_metric("kv_transfer_completed_total") - completed

    async def no_leaks() -> None:
        for server, resources in zip(servers, before, strict=True):
            leaked = server.count_resources() - resources - LATE_RESOURCES
            assert not leaked, (server.role, leaked)

    await eventually(no_leaks)


async def run_with_fault(
    deployment: Deployment,
    right: Right,
    victim: Instance | None,
    fault: Act,
    heal: Act | None = None,
    lasts: float = 0.0,
    clients: int = 6,
    pause: float = 0.0,
) -> FaultResult:
    """Inject a fault under load.

    Args:
        victim: server that takes part in no request during the fault; None: all servers do.
        heal: ends the fault.
        lasts: seconds between ``fault`` and ``heal``.
        clients, pause: number of clients, and seconds between two requests of a client (``Load``).
    """
    async with under_load(deployment, right, clients, pause) as (load, result):
        began = time.monotonic()
        await fault()
        answered = asyncio.create_task(load.probe())
        await asyncio.sleep(max(lasts, 0.2))  # afterwards, the victim's last log lines have been read
        log = victim.served if victim else None
        num_lines = len(log.lines) if log else 0
        ended = time.monotonic() if heal else began
        if heal:
            await heal()
        if victim:
            first_line = num_lines if victim.served is log else 0  # a restarted server has a new log
            await deployment.ready()
            if victim in deployment.instances:
                await asyncio.to_thread(victim.served.find, TRANSFER, first_line, 120.0)
                result.repaired = time.monotonic() - ended
            else:
                result.repaired = await load.right_since(time.monotonic()) - ended
        result.answered = await answered - began
    return result


async def in_thread(function: Callable[..., object], *args: object) -> None:
    """Run a blocking function in a thread (an ``Act``)."""
    await asyncio.to_thread(function, *args)


def suspend(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Continue a stopped process; does nothing if the process was killed meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
