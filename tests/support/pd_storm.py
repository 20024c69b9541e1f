"""Storms over separate prefill and decode instances: what clients of routers hear while instances are killed, stopped,
cut off or have no room, and what is left of it afterwards."""

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
"""``--engine-iteration-timeout``."""
DEADLINE = 60.0
"""Seconds after which a request counts as lost."""
COMMON = (
    "--kv-timeout",
    str(KV_TIMEOUT),
    "--engine-iteration-timeout",
    str(ENGINE_TIMEOUT),
)
ROOM = ("--num-gpu-blocks-override", "120")
ROUTER = ("--pd-min-prefill-tokens", "32")
SLOT_BYTES = "196608"
"""``--kv-buffer-size`` of one slot of the built-in model."""
KEPT = ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "kv_transfer_slots_used")
"""Metrics of an instance that are zero once nothing is asked."""
TRANSFER = r"transfer \w+: \d+ tokens"
"""What the log of an instance says when it takes part in a transfer."""


class Outcome(StrEnum):
    RIGHT = "right"  # as the single instance answers
    ERROR = "error"  # an error's status, or an error event in the stream
    BROKEN = "broken"  # the connection broke or there was none
    WRONG = "wrong"
    LOST = "lost"  # nothing in time, or an end without a word


class Heard(NamedTuple):
    """What a client heard."""

    outcome: Outcome
    sent: float
    """When it asked."""
    ended: float
    words: str = ""


class Question(NamedTuple):
    """A request, whose right answer the single instance gives."""

    path: str
    body: dict[str, Any]


Answer = tuple[str, str]
"""Text, and why it ended."""
Right = dict[int, tuple[Question, Answer]]
"""Questions with their right answers."""


def questions(count: int) -> list[Question]:
    """Streams and others, greedy and sampled, in several dialects; every prompt has two slots of tokens or more."""
    topics = ("the sea", "a fox", "bread", "the moon", "两只狐狸", "a harbour", "winter", "a clock")
    made = []
    for i in range(count):
        text = f"Number {i // 2}: a story about {topics[i % len(topics)]}, its friends and its days. " * (8 + i % 6)
        sampling: dict[str, Any] = {"temperature": 0} if i % 3 else {"temperature": 0.9, "seed": i}
        tokens, stream = (4, 40, 160)[i % 3], i % 2 == 0
        common = {**sampling, "ignore_eos": True, "stream": stream}
        chat = [{"role": "user", "content": text}]
        made.append(
            (
                Question("/v1/completions", {"prompt": text, "max_tokens": tokens, **common}),
                Question("/v1/chat/completions", {"messages": chat, "max_tokens": tokens, **common}),
                Question("/generate", {"prompt": text, "max_tokens": tokens, **common}),
                Question("/v1/responses", {"input": text, "max_output_tokens": tokens, **common}),
                Question("/v1/messages", {"messages": chat, "max_tokens": tokens, "temperature": 0, "stream": stream}),
            )[i % 5]
        )
    return made


# --- Clients ----------------------------------------------------------------------------------------------------------


class ToldError(Exception):
    """The server has told an error."""


class CutShortError(Exception):
    """A stream ended without a last event. ``str`` is its text so far."""


class Client:
    """A connection a request."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._salts = itertools.count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def answer(self, root: str, question: Question) -> Answer:
        """Raises ``ToldError``, ``CutShortError``, or what aiohttp raises."""
        body = dict(question.body)
        if question.path != "/v1/messages":
            body["cache_salt"] = f"{os.getpid()} {next(self._salts)}"  # nothing is cached: it has to be transferred
        async with self._session.post(root + question.path, json=body) as got:
            if got.status != 200:
                raise ToldError(f"{got.status}: {_message(json.loads(await got.read()))}")
            if not body["stream"]:
                return _whole(json.loads(await got.read()), body)
            return await _streamed(got, body)

    async def ask(self, root: str, question: Question, right: Answer) -> Heard:
        """Ask a question whose right answer is known."""
        sent = time.monotonic()

        def heard(outcome: Outcome, words: str = "") -> Heard:
            return Heard(outcome, sent, time.monotonic(), words)

        try:
            async with asyncio.timeout(DEADLINE):
                found = await self.answer(root, question)
        except TimeoutError:
            return heard(Outcome.LOST, f"nothing in time: {question.path}")
        except CutShortError as error:
            return heard(Outcome.LOST, f"a stream ended without a last event: {question.path} {error}")
        except ToldError as error:
            return heard(Outcome.ERROR, str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            return heard(Outcome.BROKEN, repr(error))
        except (ValueError, KeyError) as error:
            return heard(Outcome.WRONG, f"no proper answer: {error!r}")
        if found == right:
            return heard(Outcome.RIGHT)
        return heard(Outcome.WRONG, f"{question.path}: {found}, not {right}")


def _message(document: dict[str, Any]) -> str:
    error = document.get("error", document)
    return str(error["message"] if isinstance(error, dict) else error)


def _whole(document: dict[str, Any], body: dict[str, Any]) -> Answer:
    if "choices" in document:
        (choice,) = document["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]
    if "output" in document:
        if document["status"] == "failed":
            raise ToldError(_message(document))
        return document["output"][-1]["content"][0]["text"], document["status"]
    if "content" in document:
        return "".join(block["text"] for block in document["content"]), document["stop_reason"]
    (text,) = document["text"]
    return text.removeprefix(body["prompt"]), ""


async def _streamed(got: aiohttp.ClientResponse, body: dict[str, Any]) -> Answer:
    text, reason, ended = "", None, False
    async for event in _events(got):
        if event.get("error") or event.get("type") == "error":
            raise ToldError(_message(event))
        match event:
            case {"end": True}:
                ended = True
            case {"choices": [choice]}:
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                reason = choice["finish_reason"] or reason
            case {"type": "response.output_text.delta" | "content_block_delta", "delta": delta}:
                text += delta if isinstance(delta, str) else delta["text"]
            case {"type": "response.failed", "response": response}:
                raise ToldError(_message(response))
            case {"type": "response.completed" | "response.incomplete", "response": {"status": status}}:
                reason, ended = status, True
            case {"type": "message_delta", "delta": {"stop_reason": stop}}:
                reason = stop
            case {"type": "message_stop"}:
                ended = True
            case {"text": [so_far]} if "type" not in event:
                text, reason = so_far.removeprefix(body["prompt"]), ""
    if reason != "" and not (reason and ended):
        raise CutShortError(repr(text))
    return text, reason


async def _events(got: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in got.content:
        for part in line.split(b"\0"):
            data = part.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                yield {"end": True}
            elif data.startswith(b"{"):
                yield json.loads(data)


class Load:
    """Clients that ask without end. Who gets no answer asks another router next.

    Args:
        roots: of the routers.
        right: the questions with their right answers.
        pause: seconds between two requests of a client.
    """

    def __init__(self, roots: Sequence[str], right: Right, clients: int, pause: float = 0.0) -> None:
        self.heard: list[Heard] = []
        self._roots, self._right, self._pause = roots, right, pause
        self._numbers = itertools.count()
        self._ended = False
        self._more = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(clients)]

    async def _ask(self, router: int) -> None:
        async with Client() as client:
            while not self._ended:
                question, right = self._right[next(self._numbers) % len(self._right)]
                heard = await client.ask(self._roots[router % len(self._roots)], question, right)
                self.heard.append(heard)
                router += heard.outcome is not Outcome.RIGHT
                async with self._more:
                    self._more.notify_all()
                await asyncio.sleep(self._pause if heard.outcome is Outcome.RIGHT else 0.1)

    async def probe(self) -> float:
        """Ask a short question, four times a second, of each router in turn, until it was answered right; when it
        was."""
        short = min(self._right, key=lambda number: len(self._right[number][1][0]))
        asking: list[asyncio.Task[Heard]] = []
        async with Client() as client:
            while True:
                root = self._roots[len(asking) % len(self._roots)]
                asking.append(asyncio.create_task(client.ask(root, *self._right[short])))
                await asyncio.sleep(0.25)
                told = [one.result() for one in asking if one.done()]
                if right := [one.ended for one in told if one.outcome is Outcome.RIGHT]:
                    self.heard += await asyncio.gather(*asking)
                    return min(right)

    async def right_since(self, start: float, count: int = 1) -> float:
        """Wait until so many requests that were sent since ``start`` were answered right; when the last one was."""

        def found() -> list[float]:
            return sorted(one.ended for one in self.heard if one.outcome is Outcome.RIGHT and one.sent >= start)

        async with asyncio.timeout(120), self._more:
            await self._more.wait_for(lambda: len(found()) >= count)
        return found()[count - 1]

    async def end(self) -> list[Heard]:
        self._ended = True
        await asyncio.gather(*self._tasks)
        return self.heard


# --- The deployment ---------------------------------------------------------------------------------------------------


class Instance:
    """A router or an instance, which can be started again as it was."""

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
        """kill -9 of these processes, or of the server, whose others follow."""
        for pid in pids or (self.served.pid,):
            os.kill(pid, signal.SIGKILL)

    def start_again(self) -> None:
        """After all of it was killed."""
        self.served.kill()
        self.start()
        self.served.start()

    def replace(self) -> None:
        """Stop it, as its user does, and start it again."""
        self.served.terminate()
        assert self.served.ended() == 0, "\n".join(self.served.lines[-50:])
        self.start_again()

    def possessions(self) -> Counter[str]:
        """Its processes, and the most files of each type that one of each kind has."""
        served = self.served
        found = Counter(processes=len(processes(served.pid)))
        for kind, pids in {"supervisor": [served.pid], **served.pids}.items():
            for pid in pids:
                found |= Counter({f"{name} of {kind}": count for name, count in _files(pid).items()})
        return found


def _files(pid: int) -> Counter[str]:
    """How many files of each type a process has: sockets, pipes, shared memory and others."""
    found: Counter[str] = Counter()
    for descriptor in (Path("/proc") / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            found[target.partition(" ")[0] if "memfd" in target else target.partition(":")[0]] += 1
    return Counter({"files" if name.startswith("/") and "memfd" not in name else name: n for name, n in found.items()})


class Deployment:
    """Routers, prefill and decode instances with the built-in model. Everything is ready within the context.

    Args:
        folder: for the cluster secret.
        prefill_flags, decode_flags: of all instances of a role.
        fault: of the network between decode and prefill instances; None where there is none.
        machines: where each instance has one, the routers the first one together; None: all on this one.
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
        common = ("--cluster-secret-file", str(secret), *COMMON)
        self._stack = ExitStack()
        self.instances: list[Instance] = []
        self.proxies: list[KVProxy] = []
        ports = free_ports(routers)
        addresses = [f"{self._host(0)}:{port}" for port in ports]
        self.routers: list[Instance] = []
        for port in ports:
            self.routers.append(self._instance("router", 0, *ROUTER, *common, "--port", str(port)))
        joins = (*common, *ROOM, "--router-address", ",".join(addresses))
        for i in range(prefill):
            own: tuple[str, ...] = ()
            if fault:
                (port,) = free_ports(1)
                self.proxies.append(KVProxy(f"127.0.0.1:{port}", fault, i))
                own = ("--kv-port", str(port), "--kv-advertised-address", self.proxies[-1].address)
            self.instances.append(self._instance("prefill", 1 + i, *joins, *own, *prefill_flags))
        transport = ("--kv-transport", "tcp") if fault or machines else ()
        for i in range(decode):
            self.instances.append(self._instance("decode", 1 + prefill + i, *joins, *transport, *decode_flags))

    def _host(self, node: int) -> str:
        return self.machines.addresses[node] if self.machines else "127.0.0.1"

    def _instance(self, role: str, node: int, *flags: str) -> Instance:
        def place() -> AbstractContextManager[None]:
            return self.machines.inside(node) if self.machines else nullcontext()

        made = Instance(role, (*flags, "--host", self._host(node)), place)
        self._stack.callback(lambda: made.served.kill())
        return made

    def __enter__(self) -> Self:
        try:
            for one in [*self.instances, *self.routers]:
                one.served.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        with self._stack:
            for proxy in self.proxies:
                proxy.close()
            if error[0] is None:
                for one in [*self.routers, *self.instances]:
                    one.served.terminate()
                    assert one.served.ended() == 0, "\n".join(one.served.lines[-50:])

    def of(self, role: str) -> list[Instance]:
        return [one for one in self.instances if one.role == role]

    @property
    def roots(self) -> list[str]:
        """Of the routers."""
        return [one.served.root for one in self.routers]

    async def ready(self) -> None:
        """Wait until every router uses every instance, and no other is left."""
        expected = sorted((one.role, "ready") for one in self.instances)

        async def check() -> None:
            async with aiohttp.ClientSession() as session:
                for root in self.roots:
                    async with session.get(f"{root}/penstock/instances") as got:
                        found = [(one["role"], one["state"]) for one in (await got.json())["instances"]]
                    assert sorted(found) == expected, found

        await eventually(check)

    async def settled(self) -> None:
        """Wait until no instance has a request, a KV block or a slot of the transfer buffer that is not free."""

        async def check() -> None:
            for one in self.instances:
                found = await read_metrics(one.served)
                left = {name: found[f"penstock:{name}"] for name in KEPT if found[f"penstock:{name}"]}
                assert not left, (one.role, left)
                assert found["penstock:kv_blocks"] > 0 < found["penstock:kv_transfer_slots"]
            for router in self.routers:
                assert not (await read_metrics(router.served))["penstock:num_requests_open"]

        await eventually(check)

    async def counts(self, name: str) -> float:
        """The sum of a metric over the decode instances."""
        found: list[float] = [(await read_metrics(one.served))[f"penstock:{name}"] for one in self.of("decode")]
        return sum(found)


# --- Rows -------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What became of the requests around a fault."""

    heard: list[Heard] = field(default_factory=list)
    answered: float = 0.0
    """Seconds from the fault until a request that was sent after it was answered right."""
    repaired: float | None = None
    """Seconds from the end of the fault, or a kill, until who was struck took part in an answer again."""
    transfers: float = 0.0
    """KV transfers that came to a good end meanwhile; those of decode instances that were killed are not counted."""

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(one.outcome for one in self.heard)

    def without(self, *outcomes: Outcome) -> None:
        """Assert that there were none of these, and that nothing was lost or wrong."""
        bad = {Outcome.LOST, Outcome.WRONG, *outcomes}
        assert not (found := [one for one in self.heard if one.outcome in bad]), (self.counts, found[:5])


Act = Callable[[], Awaitable[None]]


async def right_answers(root: str, asked: Iterable[Question]) -> Right:
    """What a single instance answers."""
    async with Client() as client:
        return {i: (question, await client.answer(root, question)) for i, question in enumerate(asked)}


@asynccontextmanager
async def loaded(deployment: Deployment, right: Right, clients: int, pause: float) -> AsyncIterator[tuple[Load, Row]]:
    """Clients ask while the context lasts. Afterwards nothing is in use that was free before."""
    row = Row()
    await deployment.ready()
    warm = Load(deployment.roots, right, clients, pause)  # whoever talks to whom has its connections
    await warm.right_since(0.0, 3 * clients)
    await warm.end()
    await deployment.settled()
    everyone = [*deployment.routers, *deployment.instances]
    before = [one.possessions() for one in everyone]
    completed = await deployment.counts("kv_transfer_completed_total")
    load = Load(deployment.roots, right, clients, pause)
    await load.right_since(0.0, clients)
    yield load, row
    await load.right_since(time.monotonic(), clients)
    row.heard = await load.end()
    await deployment.ready()
    await deployment.settled()
    row.transfers = await deployment.counts("kv_transfer_completed_total") - completed

    async def same() -> None:
        for one, own in zip(everyone, before, strict=True):
            grown = one.possessions() - own
            assert not grown, (one.role, grown)

    await eventually(same)


async def struck(
    deployment: Deployment,
    right: Right,
    victim: Instance | None,
    fault: Act,
    heal: Act | None = None,
    lasts: float = 0.0,
    clients: int = 6,
    pause: float = 0.0,
) -> Row:
    """A fault under load.

    Args:
        victim: who takes part in nothing while the fault lasts; None where nobody does.
        heal: ends the fault.
        lasts: seconds between the two.
        clients, pause: as in ``Load``.
    """
    async with loaded(deployment, right, clients, pause) as (load, row):
        began = time.monotonic()
        await fault()
        answered = asyncio.create_task(load.probe())
        await asyncio.sleep(max(lasts, 0.2))  # what the victim said last has been read
        log = victim.served if victim else None
        read = len(log.lines) if log else 0
        ended = time.monotonic() if heal else began
        if heal:
            await heal()
        if victim:
            after = read if victim.served is log else 0
            await deployment.ready()
            if victim in deployment.instances:
                await asyncio.to_thread(victim.served.find, TRANSFER, after, 120.0)
                row.repaired = time.monotonic() - ended
            else:
                row.repaired = await load.right_since(time.monotonic()) - ended
        row.answered = await answered - began
    return row


async def acting(function: Callable[..., object], *args: object) -> None:
    """Run what blocks, as an ``Act``."""
    await asyncio.to_thread(function, *args)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """A process that was stopped for long may have been ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
