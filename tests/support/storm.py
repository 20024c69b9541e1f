"""Reliability scenarios: clients disconnect or read slowly, processes are killed or stopped, queues are full.

Each scenario starts a server, or uses a running one, and sends requests with known answers over real sockets. No
request may be lost: every accepted request gets its whole answer or an error.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from serving import START_TIMEOUT, Served, count_files_and_threads, num_sockets, worker_pids

from penstock import LLM
from penstock.core import SamplingParams
from penstock.engine.service import messages as engine_messages
from penstock.frontend.gateway import NUM_ENCODE_THREADS

REQUEST_TIMEOUT = 120.0
"""Seconds after which a request counts as lost."""
IDLE_TIMEOUT = 60.0
"""Seconds within which the server must be idle again, with all resources released."""
READ_SIZE = 100
"""Number of bytes that a slow reader reads at a time."""
SERVER_OPTIONS = ("--num-gpu-blocks-override", "1500")
IDLE_METRICS = ("num_requests_running", "num_requests_waiting", "num_requests_open", "kv_blocks_used")
LOGPROB_FIELDS = {"/completions": {"logprobs": 20}, "/chat/completions": {"logprobs": True, "top_logprobs": 20}}
"""Fields by path that make responses much longer than their text."""


LATE_RESOURCES = {"threads of api": NUM_ENCODE_THREADS - 1, "files of engine": 1}
"""Threads and files that may be added after the warm-up: on a busy machine, one thread may have encoded all prompts; an
idle engine starts its grammar compiler process, to which it has a socket."""
RESUMED = "penstock:requests_resumed_total"
LOOP_BLOCKED = r"event loop was blocked for ([\d.]+) s"
MAX_LOOP_BLOCK = 0.3
"""Maximum seconds of processor time of one iteration of an event loop. This is far above the threshold of the log
message, as cores shared with other processes have cold caches. ``make thorough`` has a limit for an idle machine."""


class Outcome(StrEnum):
    RIGHT = "right"  # text and finish reason equal the expected ones
    WRONG = "wrong"
    REFUSED = "refused"  # status 429 or 503 with Retry-After, or the connection was refused
    FAILED = "failed"  # the stream had an error event, or the response an error status
    BROKEN = "broken"  # the connection broke
    LEFT = "left"  # the client disconnected
    LOST = "lost"  # no data arrived within the timeout, or the stream ended without a finish reason


class Reply(NamedTuple):
    """Outcome of one request."""

    outcome: Outcome
    message: str = ""
    """Error message, or description of the difference from the expected answer."""
    status: int = 0
    longest_pause: float = 0.0
    """Seconds of the longest pause between two events of the stream."""


@dataclass
class Tally:
    """Outcomes of the requests of a scenario."""

    scenario: str
    replies: list[Reply] = field(default_factory=list)
    slowest: float = 0.0
    """Maximum seconds until an error, over the requests that must fail or be refused immediately."""
    slowest_live: float = 0.0
    """Seconds of the slowest response of ``/live``."""

    @property
    def longest_pause(self) -> float:
        """Seconds of the longest pause within a stream."""
        return max((reply.longest_pause for reply in self.replies), default=0.0)

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(reply.outcome for reply in self.replies)

    def assert_only(self, *outcomes: Outcome) -> None:
        """Assert that all requests had one of these outcomes."""
        others = [reply for reply in self.replies if reply.outcome not in outcomes]
        assert not others, (self.scenario, self.counts, others[:5])


@dataclass(frozen=True)
class Question:
    """A greedy request with its expected text and finish reason."""

    path: str
    body: dict[str, Any]
    text: str
    reason: str


def questions(long: int = 100, kinds: int = 8) -> list[Question]:
    """Chats and completions of 1 to ``long`` tokens, with and without streaming; ``LLM`` computes the expected
    answers."""
    llm = reference_llm()
    lengths, topics = [1, 7, long // 2, long, long], ["a fox", "两只狐狸", "the sea", "a 🦊", "bread", "月亮"]
    return [
        make_question(llm, topics[i % len(topics)], lengths[i % len(lengths)], chat=i % 2 == 1, stream=i % 4 != 2)
        for i in range(kinds)
    ]


@functools.cache
def reference_llm() -> LLM:
    """Engine that computes the expected answers."""
    return LLM(num_gpu_blocks_override=400)


@functools.cache
def endless() -> Question:
    """A request whose stream lasts many seconds when several such streams run at once."""
    return make_question(reference_llm(), "the sea", 1500, chat=True, stream=True)


def make_question(llm: LLM, topic: str, tokens: int, chat: bool, stream: bool) -> Question:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    common = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    if chat:
        messages = [{"role": "user", "content": f"Tell me a story about {topic}."}]
        (output,) = llm.chat(messages, params, use_tqdm=False)
        path, body = "/chat/completions", {"messages": messages}
    else:
        prompt = f"The story of {topic}:"
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        path, body = "/completions", {"prompt": prompt}
    completion = output.outputs[0]
    return Question(path, body | common, completion.text, str(completion.finish_reason))


# --- One client -----------------------------------------------------------------------------------------------------


class Client:
    """Client that opens a connection for each request.

    Args:
        buffer: receive buffer of a connection, bytes.
    """

    def __init__(self, url: str, buffer: int = 2**16) -> None:
        self._url = url

        def new_socket(address: Any) -> socket.socket:
            result = socket.socket(address[0], address[1], address[2])
            result.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            return result

        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=new_socket)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=buffer)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(
        self, question: Question, *, leave: int | None = None, pause: float = 0.0, began: asyncio.Event | None = None
    ) -> Reply:
        """Send a request and read the whole response.

        Args:
            leave: number of events after which to disconnect.
            pause: seconds between two reads of ``READ_SIZE`` bytes; 0: read everything available.
            began: set at the first event.
        """
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT),
                self._session.post(self._url + question.path, json=question.body) as response,
            ):
                if response.status != 200:
                    return await _error_reply(response)
                if not question.body["stream"]:
                    return _check(question, *_parse_response(await response.json()))
                return await self._read_stream(response, question, leave, pause, began)
        except TimeoutError:
            return Reply(Outcome.LOST, f"no complete response within {REQUEST_TIMEOUT:.0f} s")
        except aiohttp.ClientConnectorError as error:
            return Reply(Outcome.REFUSED, str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            return Reply(Outcome.BROKEN, repr(error))

    async def _read_stream(
        self,
        response: aiohttp.ClientResponse,
        question: Question,
        leave: int | None,
        pause: float,
        began: asyncio.Event | None,
    ) -> Reply:
        text, reason, message = "", None, ""
        count, last, longest = 0, time.monotonic(), 0.0
        async for data in _events(response, pause):
            count, before, last = count + 1, last, time.monotonic()
            if count > 1:
                longest = max(longest, last - before)
            if began:
                began.set()
            if count == leave:
                if random.random() < 0.5 and response.connection and response.connection.transport:
                    response.connection.transport.abort()
                return Reply(Outcome.LEFT)
            if data == "[DONE]":
                if message and question.text.startswith(text):
                    return Reply(Outcome.FAILED, message)
                if message:
                    return Reply(Outcome.WRONG, f"{message}, after {text!r}")
                return _check(question, text, reason)._replace(longest_pause=longest)
            event = json.loads(data)
            if "error" in event:
                message = event["error"]["message"]
            else:
                more, ended = _parse_chunk(event)
                text, reason = text + more, reason or ended
        return Reply(Outcome.LOST, f"the stream ended without [DONE] after {count} events and {text!r}")


async def _events(response: aiohttp.ClientResponse, pause: float) -> AsyncIterator[str]:
    """Data of the events of a stream, without comments.

    Args:
        pause: seconds between two reads of ``READ_SIZE`` bytes; 0: read everything available.
    """
    rest = b""
    while True:
        read = await (response.content.read(READ_SIZE) if pause else response.content.readany())
        if not read:
            return
        *events, rest = (rest + read).split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):
                yield event.decode().removeprefix("data: ")
        if pause:
            await asyncio.sleep(pause)


async def _error_reply(response: aiohttp.ClientResponse) -> Reply:
    error = (await response.json())["error"]
    if response.status in (429, 503):
        outcome = Outcome.REFUSED if "retry-after" in response.headers else Outcome.WRONG
        return Reply(outcome, error["message"], response.status)
    return Reply(Outcome.FAILED, error["message"], response.status)


def _parse_chunk(event: dict[str, Any]) -> tuple[str, str | None]:
    (choice,) = event["choices"]
    text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text, choice["finish_reason"]


def _parse_response(document: dict[str, Any]) -> tuple[str, str | None]:
    (choice,) = document["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]


def _check(question: Question, text: str, reason: str | None) -> Reply:
    if reason is None:
        return Reply(Outcome.LOST, "no finish reason")
    if (text, reason) != (question.text, question.reason):
        return Reply(Outcome.WRONG, f"{text!r} ({reason}), not {question.text!r} ({question.reason})")
    return Reply(Outcome.RIGHT)


# --- One server -----------------------------------------------------------------------------------------------------


async def read_metrics(served: Served) -> dict[str, float]:
    """Values of ``/metrics``, each summed over its labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{served.root}/metrics") as response:
        text = await response.text()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


async def eventually(check: Callable[[], Awaitable[None]], limit: float = IDLE_TIMEOUT) -> None:
    """Repeat ``check`` until it passes, for at most ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return await check()
        except (AssertionError, KeyError, aiohttp.ClientError, OSError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


async def is_ready(served: Served) -> bool:
    """True if the server accepts requests."""
    async with aiohttp.ClientSession() as session, session.get(f"{served.root}/ready") as response:
        return response.status == 200


async def assert_ready(served: Served) -> None:
    """Assert that the server accepts requests."""
    assert await is_ready(served)


async def wait_until_idle(served: Served) -> None:
    """Wait until no request is running, waiting or open, and no KV block is in use."""

    async def check() -> None:
        found = await read_metrics(served)
        left = {name: found[f"penstock:{name}"] for name in IDLE_METRICS}
        assert not any(left.values()), left
        assert found["penstock:kv_blocks"] > 0, "penstock:kv_blocks is 0: no engine reports metrics"

    await eventually(check)


def count_resources(served: Served) -> dict[str, int]:
    """Maximum numbers of open files and threads over the processes of each kind."""
    found: dict[str, int] = {}
    for kind, pids in {"supervisor": [served.pid], **served.pids}.items():
        if pids:
            files, threads = zip(*map(count_files_and_threads, pids), strict=True)
            found |= {f"files of {kind}": max(files), f"threads of {kind}": max(threads)}
    return found


@asynccontextmanager
async def server(
    questions: Sequence[Question], *arguments: str, max_block: float = MAX_LOOP_BLOCK, shared: Served | None = None
) -> AsyncIterator[Served]:
    """Context with a server for a scenario. At its end, asserts that the numbers of open files, threads and free KV
    blocks are as before, and that no event loop was blocked for more than ``max_block`` seconds at a time.

    Args:
        arguments: options of ``penstock serve`` for a new server.
        shared: a running server to use instead of a new one.
    """
    with nullcontext(shared) if shared else Served(*SERVER_OPTIONS, *arguments) as served:
        await warm_up(served, questions)
        before, first_line = count_resources(served), len(served.lines)
        yield served
        blocks = [(re.search(LOOP_BLOCKED, line), line) for line in served.lines[first_line:]]
        too_long = [line for found, line in blocks if found and float(found[1]) > max_block]
        assert not too_long, too_long
        if served.running:
            await warm_up(served, questions)

            async def no_leaks() -> None:
                now = count_resources(served)
                limits = {name: before.get(name, 0) + LATE_RESOURCES.get(name, 0) for name in now}
                leaked = {name: (before.get(name, 0), now[name]) for name in now if now[name] > limits[name]}
                assert not leaked, leaked

            await eventually(no_leaks)


async def warm_up(served: Served, questions: Sequence[Question]) -> None:
    """Send the short questions to every API process, and long prompts, which are encoded in threads and refused."""
    long = Question("/completions", {"prompt": "long " * 3000, "max_tokens": 1, "stream": False}, "", "")
    short = [question for question in questions if question.body["max_tokens"] < 10]

    async def check() -> None:
        async with Client(served.url) as client:
            replies = await send_all(16, 4, lambda i: client.send(short[i % len(short)]))
            assert all(reply.outcome is Outcome.RIGHT for reply in replies), replies
            for reply in await send_all(8, 4, lambda _: client.send(long)):
                assert reply.status == 400, reply

    await eventually(check, START_TIMEOUT)
    await wait_until_idle(served)


async def send_all(count: int, concurrency: int, send: Callable[[int], Awaitable[Reply]]) -> list[Reply]:
    """Send ``count`` requests, at most ``concurrency`` at a time."""
    semaphore = asyncio.Semaphore(concurrency)

    async def send_one(number: int) -> Reply:
        async with semaphore:
            return await send(number)

    return await asyncio.gather(*map(send_one, range(count)))


@asynccontextmanager
async def open_streams(
    served: Served, questions: Sequence[Question], count: int
) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Open ``count`` streams; each has sent its first event when the context begins."""
    async with Client(served.url) as client:
        began = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(client.send(questions[i % len(questions)], began=event))
            for i, event in enumerate(began)
        ]
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                await asyncio.gather(*(event.wait() for event in began))
            yield tasks
        finally:
            for task in tasks:
                task.cancel()


async def send_at_once(tally: Tally, served: Served, questions: Sequence[Question], count: int) -> None:
    """Send ``count`` requests at once, and add their outcomes to the tally."""
    async with Client(served.url) as client:
        tally.replies += await send_all(count, count, lambda i: client.send(questions[i % len(questions)]))


def long_running(question: Question, stream: bool = True) -> Question:
    """Copy of a request with enough tokens to run for much longer than ``IDLE_TIMEOUT``."""
    return replace(question, body=question.body | {"n": 4, "max_tokens": 1900, "stream": stream})


def longest(questions: Sequence[Question]) -> list[Question]:
    """Streaming requests with the maximum number of tokens."""
    most = max(question.body["max_tokens"] for question in questions)
    return [question for question in questions if question.body["stream"] and question.body["max_tokens"] == most]


def run(scenario: Coroutine[Any, Any, Tally], limit: float = 300) -> Tally:
    """Run a scenario, for at most ``limit`` seconds."""
    return asyncio.run(asyncio.wait_for(scenario, limit))


# --- Scenarios ------------------------------------------------------------------------------------------------------


async def clients_disconnecting(
    questions: Sequence[Question], count: int, width: int = 64, seed: int = 1, shared: Served | None = None
) -> Tally:
    """Some clients disconnect before or during their streams; the other clients' answers are right."""
    tally, rng = Tally("clients disconnect"), random.Random(seed)
    plan = [rng.choice((None, None, 0, 1, 2, 5, 20)) for _ in range(count)]
    async with server(questions, shared=shared) as served, Client(served.url) as client:

        async def send(number: int) -> Reply:
            question, leave = questions[number % len(questions)], plan[number]
            if leave is None:
                return await client.send(question)
            endless = long_running(question, stream=bool(leave))
            if leave:
                return await client.send(endless, leave=leave)
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 0.1)):
                    return await client.send(endless)
            return Reply(Outcome.LEFT)

        tally.replies = await send_all(count, width, send)
    tally.assert_only(Outcome.RIGHT, Outcome.LEFT)
    return tally


async def slow_and_silent_readers(
    questions: Sequence[Question],
    slow: int,
    silent: int,
    others: int,
    pause: float = 0.001,
    shared: Served | None = None,
) -> Tally:
    """Clients read a few bytes at a time, or never; a client that never reads is disconnected after
    ``--client-timeout``."""
    tally = Tally("slow and silent readers")
    large = [Question(q.path, q.body | LOGPROB_FIELDS[q.path], q.text, q.reason) for q in longest(questions)]
    async with (
        server(questions, "--client-timeout", "2", shared=shared) as served,
        Client(served.url, buffer=4096) as narrow,
        Client(served.url) as wide,
    ):
        parts = await asyncio.gather(
            send_all(slow, slow, lambda i: narrow.send(large[i % len(large)], pause=pause)),
            send_all(silent, silent, lambda _: never_read(served)),
            send_all(others, 16, lambda i: wide.send(questions[i % len(questions)])),
        )
        tally.replies = [reply for part in parts for reply in part]
    tally.assert_only(Outcome.RIGHT, Outcome.BROKEN)
    assert tally.counts[Outcome.BROKEN] == silent
    return tally


async def never_read(served: Served) -> Reply:
    """Request a response larger than the socket buffers, and read it only when the server has no open request."""
    prompts = [[token] * 2000 for token in range(4)]
    body = {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 40, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(served.root.rpartition(":")[2])))
    with connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        await asyncio.to_thread(connection.recv, 1, socket.MSG_PEEK)  # from now on the request is counted as open

        async def dropped() -> None:
            assert (await read_metrics(served))["penstock:num_requests_open"] == 0

        try:
            await eventually(dropped, REQUEST_TIMEOUT)
            connection.settimeout(30)
            while data := connection.recv(2**16):
                if b"[DONE]" in data:
                    return Reply(Outcome.WRONG, "the socket buffers held the whole response")
        except (AssertionError, TimeoutError):
            return Reply(Outcome.LOST, "still connected")
        except ConnectionError as error:
            return Reply(Outcome.BROKEN, repr(error))
    return Reply(Outcome.BROKEN, "the connection was closed")


async def many_connections(
    questions: Sequence[Question], count: int, *arguments: str, shared: Served | None = None
) -> Tally:
    """Open ``count`` connections at once; requests beyond the waiting queue are refused."""
    tally = Tally(" ".join((f"{count:,} connections at once", *arguments)))
    async with server(questions, *arguments, shared=shared) as served, Client(served.url) as client:
        tally.replies = await send_all(count, count, lambda i: client.send(questions[i % len(questions)]))
    tally.assert_only(Outcome.RIGHT, Outcome.REFUSED)
    assert all(reply.status == 429 for reply in tally.replies if reply.outcome is Outcome.REFUSED)
    return tally


async def engine_killed(
    questions: Sequence[Question], count: int, *arguments: str, times: int = 2, shared: Served | None = None
) -> Tally:
    """Kill (-9) the engine, or the first one, under load: its streams continue in the next or another engine, and
    requests that are sent meanwhile are answered."""
    tally = Tally(" ".join((f"kill -9 of the engine, {times} times", *arguments)))
    async with server(questions, *arguments, shared=shared) as served:
        resumed = (await read_metrics(served)).get(RESUMED, 0.0)
        for _ in range(times):
            async with open_streams(served, longest(questions), count) as tasks:
                os.kill(served.pids["engine"][0], signal.SIGKILL)
                await send_at_once(tally, served, questions, count)
                tally.replies += await asyncio.gather(*tasks)
            await warm_up(served, questions)
        assert (await read_metrics(served)).get(RESUMED, 0.0) > resumed
    tally.assert_only(Outcome.RIGHT)
    return tally


async def engine_replaced(
    questions: Sequence[Question], count: int, *arguments: str, shared: Served | None = None
) -> Tally:
    """Replace the engine processes under load (SIGHUP): streams continue in the new ones, no request is refused."""
    tally = Tally(" ".join(("SIGHUP", *arguments)))
    with nullcontext(shared) if shared else Served(*SERVER_OPTIONS, *arguments) as served:
        await replace_engines(served)  # the supervisor opens its connections to the engines
        async with server(questions, shared=served), open_streams(served, longest(questions), count) as tasks:
            replacing = asyncio.create_task(replace_engines(served))
            await send_at_once(tally, served, questions, count)
            tally.replies += await asyncio.gather(*tasks)
            await replacing
    tally.assert_only(Outcome.RIGHT)
    return tally


async def replace_engines(served: Served) -> None:
    """Replace the engine processes of a server (SIGHUP)."""
    old, first_line = served.pids["engine"], len(served.lines)
    os.kill(served.pid, signal.SIGHUP)
    for pid in old:
        await asyncio.to_thread(served.find, rf"engine process {pid} was replaced by", first_line)
    assert not set(old) & set(served.pids["engine"])


async def worker_killed(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """Kill (-9) a tensor-parallel rank under load: the engine restarts with all its ranks, and its streams continue."""
    tally = Tally("kill -9 of a rank, --tensor-parallel-size 2")
    async with server(questions, "--tensor-parallel-size", "2", shared=shared) as served:
        async with open_streams(served, longest(questions), count) as tasks:
            (engine,) = served.pids["engine"]
            os.kill(max(worker_pids(engine).values()), signal.SIGKILL)
            await send_at_once(tally, served, questions, count)
            tally.replies += await asyncio.gather(*tasks)
        await warm_up(served, questions)
    tally.assert_only(Outcome.RIGHT)
    return tally


async def greedy_clients(
    questions: Sequence[Question],
    count: int,
    n: int = 128,
    max_block: float = MAX_LOOP_BLOCK,
    shared: Served | None = None,
) -> Tally:
    """Some requests have many sequences with log probabilities. Other clients' streams continue, ``/live`` responds,
    and no event loop of an API process is blocked."""
    tally = Tally("greedy clients")
    fields = {"n": n, "temperature": 1, "max_tokens": 20, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    (question, *_) = longest(questions)
    async with (
        server(questions, "--num-gpu-blocks-override", "20000", max_block=max_block, shared=shared) as served,
        aiohttp.ClientSession() as session,
        Client(served.url) as client,
    ):

        async def send_greedy(number: int) -> Reply:
            stream = number % 2 == 0
            body = {"messages": [{"role": "user", "content": f"Number {number}"}], "stream": stream, **fields}
            async with session.post(f"{served.url}/chat/completions", json=body) as response:
                assert response.status == 200
                end = b""
                async for part in response.content.iter_any():
                    end = (end + part)[-16:]
                return Reply(Outcome.RIGHT if end.endswith(b"[DONE]\n\n" if stream else b"}") else Outcome.WRONG)

        async def check_live() -> None:
            begun = time.monotonic()
            async with session.get(f"{served.root}/live") as response:
                assert response.status == 200
            tally.slowest_live = max(tally.slowest_live, time.monotonic() - begun)
            await asyncio.sleep(0.02)

        async def send_others() -> list[Reply]:
            replies = []
            while not all(task.done() for task in greedy):
                replies.append(await client.send(question))
            return replies

        greedy = [asyncio.create_task(send_greedy(number)) for number in range(count)]
        others = [asyncio.create_task(send_others()) for _ in range(20)]
        while not all(task.done() for task in others):
            await check_live()
        tally.replies = [reply for task in others for reply in task.result()]
        tally.replies += [task.result() for task in greedy]
    tally.assert_only(Outcome.RIGHT)
    return tally


async def pipelined_requests(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """One connection sends thousands of requests before it reads; all are answered, and other clients do not wait."""
    tally = Tally("pipelined requests")
    async with server(questions, shared=shared) as served, Client(served.url) as client:
        body = json.dumps({"tokens": [1, 2, 3]})
        request = f"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.root.rpartition(":")[2]))
        writer.write(request.encode() * count)
        num_responses = asyncio.create_task(_count_responses(reader, count))
        tally.replies = await send_all(len(questions), 4, lambda i: client.send(questions[i % len(questions)]))
        assert await num_responses == count
        writer.close()
    tally.assert_only(Outcome.RIGHT)
    return tally


async def _count_responses(reader: asyncio.StreamReader, count: int) -> int:
    """Read up to ``count`` responses; return the number of successful responses before the first failed or incomplete
    one."""
    for number in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        if b" 200 " not in head or b"prompt" not in await reader.readexactly(int(length.split(b":")[1])):
            return number
    return count


async def engine_hung(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGSTOP of the engine under load: ``/health`` fails, the engine is killed and restarted, its streams continue."""
    tally = Tally("SIGSTOP of the engine")
    long = make_question(reference_llm(), "the sea", 300, chat=True, stream=True)  # 200 of them fit into the KV cache
    async with server(questions, "--engine-iteration-timeout", "4", shared=shared) as served:
        async with open_streams(served, [long], count) as tasks, aiohttp.ClientSession() as session:
            (engine,) = served.pids["engine"]
            os.kill(engine, signal.SIGSTOP)
            stopped = time.monotonic()

            async def unhealthy() -> None:
                async with session.get(f"{served.root}/health") as health, session.get(f"{served.root}/live") as live:
                    assert (health.status, live.status) == (503, 200)
                    assert "has not answered" in await health.text()
                assert (await read_metrics(served))["penstock:engine_heartbeat_age_seconds"] >= 1

            await eventually(unhealthy)
            tally.replies = await asyncio.gather(*tasks)
            tally.slowest = time.monotonic() - stopped
            await asyncio.to_thread(served.find, rf"process {engine}\) has not answered for \d+ seconds: killed")
        await warm_up(served, questions)
        await send_at_once(tally, served, questions, count)
    tally.assert_only(Outcome.RIGHT)
    return tally


async def api_killed(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """Kill (-9) one of two API processes under load: its connections break, the connections of the other process
    continue, and the killed process is restarted."""
    tally = Tally("kill -9 of an API process")
    long = make_question(reference_llm(), "the sea", 300, chat=True, stream=True)  # 200 of them fit into the KV cache
    async with server(questions, "--api-server-count", "2", shared=shared) as served:
        async with open_streams(served, [long], count) as tasks:
            killed = max(served.pids["api"], key=num_sockets)  # one process may have accepted all connections
            os.kill(killed, signal.SIGKILL)
            tally.replies = await asyncio.gather(*tasks)

        async def restarted() -> None:
            now = served.pids["api"]
            assert len(now) == 2
            assert killed not in now

        await eventually(restarted)
        await warm_up(served, questions)  # the new process refuses requests until it is connected to the engine
        await send_at_once(tally, served, questions, count)
    tally.assert_only(Outcome.RIGHT, Outcome.BROKEN)
    assert tally.counts[Outcome.BROKEN], "the killed process had no stream"
    return tally


async def api_stopped(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGSTOP of an API process until the engine drops the process: its requests fail."""
    tally, long = Tally("SIGSTOP of an API process"), endless()
    async with server(questions, shared=shared) as served:
        async with open_streams(served, [long], count) as tasks:
            (api,) = served.pids["api"]
            first_line, timeout = len(served.lines), 4 * engine_messages.CLIENT_TIMEOUT
            os.kill(api, signal.SIGSTOP)
            try:
                await asyncio.to_thread(served.find, "has sent nothing for", first_line, timeout)
            finally:
                os.kill(api, signal.SIGCONT)
            tally.replies = await asyncio.gather(*tasks)
        await send_at_once(tally, served, questions, count)
    tally.assert_only(Outcome.RIGHT, Outcome.FAILED)
    return tally


async def sigterm(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGTERM under load: accepted requests are answered, new requests are refused, and the exit status is 0."""
    tally = Tally("SIGTERM")
    async with (
        server(questions, shared=shared) as served,
        open_streams(served, longest(questions), count) as tasks,
        Client(served.url) as client,
    ):
        served.terminate()
        served.find("stopping")
        late = asyncio.create_task(keep_sending(client, questions, tasks))
        tally.replies = await asyncio.gather(*tasks)
        refused = await late
        assert await asyncio.to_thread(served.ended) == 0
    tally.assert_only(Outcome.RIGHT)
    tally.replies += refused
    tally.assert_only(Outcome.RIGHT, Outcome.REFUSED)
    return tally


async def keep_sending(
    client: Client, questions: Sequence[Question], tasks: Iterable[asyncio.Task[Reply]]
) -> list[Reply]:
    """Send requests, one after another, until all tasks are done."""
    replies: list[Reply] = []
    while not all(task.done() for task in tasks):
        replies.append(await client.send(questions[len(replies) % len(questions)]))
        await asyncio.sleep(0.01)
    return replies


async def sigterm_drain_timeout(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGTERM with too little time to drain: streams end with an error, and the exit status is 0."""
    tally = Tally("SIGTERM, --drain-timeout 0.2")
    async with (
        server(questions, "--drain-timeout", "0.2", shared=shared) as served,
        open_streams(served, [endless()], count) as tasks,
    ):
        served.terminate()
        begun = time.monotonic()
        tally.replies = await asyncio.gather(*tasks)
        tally.slowest = time.monotonic() - begun
        assert await asyncio.to_thread(served.ended) == 0
    tally.assert_only(Outcome.RIGHT, Outcome.FAILED)
    assert tally.counts[Outcome.FAILED]
    return tally


async def overload(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """Send more requests than the waiting queue holds: excess requests are refused immediately, and accepted requests
    are answered."""
    tally, num_accepted = Tally("overload: 4 running, 8 waiting"), 12
    async with (
        server(questions, "--max-num-seqs", "4", "--max-waiting", "8", shared=shared) as served,
        Client(served.url) as client,
    ):
        long, began = longest(questions), asyncio.Event()

        async def flood(number: int) -> Reply:
            begun = time.monotonic()
            reply = await client.send(questions[number % len(questions)])
            if reply.outcome is Outcome.REFUSED:
                tally.slowest = max(tally.slowest, time.monotonic() - begun)
            return reply

        first = [asyncio.create_task(client.send(long[i % len(long)], began=began)) for i in range(num_accepted)]
        await began.wait()
        tally.replies = await send_all(count, count, flood)
        assert all(reply.status == 429 for reply in tally.replies if reply.outcome is Outcome.REFUSED)
        assert tally.counts[Outcome.REFUSED]
        tally.replies += await asyncio.gather(*first)
    tally.assert_only(Outcome.RIGHT, Outcome.REFUSED)
    return tally


async def engine_killed_repeatedly(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """Kill (-9) the engine three times: streams continue twice, then fail, and the server exits with status 1.

    The engine is killed again as soon as it answers: even on a busy machine, the three kills must be within the minute
    in which the server counts them.
    """
    tally = Tally("the engine killed three times")
    async with server(questions, shared=shared) as served:
        for streams in (1, 1, count):
            await eventually(lambda: assert_ready(served), START_TIMEOUT)
            async with open_streams(served, longest(questions), streams) as tasks:
                (engine,) = served.pids["engine"]
                os.kill(engine, signal.SIGKILL)
                tally.replies += await asyncio.gather(*tasks)
        assert await asyncio.to_thread(served.ended) == 1
    tally.assert_only(Outcome.RIGHT, Outcome.FAILED)
    assert tally.counts[Outcome.FAILED], "no stream was open at the third kill"
    return tally


async def supervisor_killed(questions: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """Kill (-9) the supervisor: connections break, and no process remains."""
    tally = Tally("kill -9 of the supervisor")
    async with server(questions, shared=shared) as served, open_streams(served, longest(questions), count) as tasks:
        os.kill(served.pid, signal.SIGKILL)
        tally.replies = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(served.ended) == -signal.SIGKILL
    tally.assert_only(Outcome.RIGHT, Outcome.BROKEN)
    return tally
