"""Storms: what a server goes through, from clients who leave to processes that are killed, and what its clients hear.

Every scenario runs a server, of its own unless it is given one, and asks it, over real sockets, questions whose right
answers are known beforehand. Nothing may be lost: who was taken on is answered, or told that there will be no answer.
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
from serving import START_TIMEOUT, Served, count_files_and_threads

from penstock import LLM, SamplingParams
from penstock.engine.service import messages as engine_messages
from penstock.frontend.gateway import NUM_ENCODE_THREADS

HANGS = 120.0
"""Seconds after which a request counts as lost."""
TO_SETTLE = 60.0
"""Seconds after which everything must be back."""
SIP = 100
"""Bytes."""
ROOM = ("--num-gpu-blocks-override", "1500")
KEPT = ("num_requests_running", "num_requests_waiting", "num_requests_open", "kv_blocks_used")
LOUD = {"/completions": {"logprobs": 20}, "/chat/completions": {"logprobs": True, "top_logprobs": 20}}
"""Makes answers that are much longer than their text."""


UNSTARTED = {"threads of api": NUM_ENCODE_THREADS - 1, "files of engine": 1}
"""What a process may have more of than when it was warm: one thread encodes all where a machine is too busy for two;
the engine's process that compiles grammars, to which it has a socket, starts once there is nothing to do."""
HOLD = r"event loop was blocked for ([\d.]+) s"
HELD = 0.3
"""Seconds of processor time that one iteration of an event loop may take: far more than the log tells from, as a core
that others use, too, has less in its caches. ``make thorough`` has a bound for an idle machine."""


class Outcome(StrEnum):
    RIGHT = "right"  # to the byte, with its finish reason
    WRONG = "wrong"
    REFUSED = "refused"  # 429 or 503 with Retry-After, or no connection
    FAILED = "failed"  # an error event, or an error's status
    BROKEN = "broken"  # the connection broke
    LEFT = "left"  # by us
    LOST = "lost"  # nothing came any more, or an end without a word


class Heard(NamedTuple):
    """What a client heard."""

    outcome: Outcome
    words: str = ""
    """Of an error, or what was wrong."""
    status: int = 0


@dataclass
class Tally:
    """What became of the requests of a scenario."""

    scenario: str
    heard: list[Heard] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds until the last of those was told who had to be told at once."""
    at_once: bool = True
    """Whether all of those were told before what was killed had come back."""
    live: float = 0.0
    """Seconds that the slowest answer of ``/live`` took."""
    gap: float = 0.0
    """Seconds of the longest pause within a stream."""

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(one.outcome for one in self.heard)

    def only(self, *outcomes: Outcome) -> None:
        """Assert that there were no others."""
        others = [one for one in self.heard if one.outcome not in outcomes]
        assert not others, (self.scenario, self.counts, others[:5])


@dataclass(frozen=True)
class Question:
    """A greedy request and its right answer."""

    path: str
    body: dict[str, Any]
    text: str
    reason: str


def questions(long: int = 100, kinds: int = 8) -> list[Question]:
    """Chats and plain completions, streamed and whole, of 1 to ``long`` tokens, answered by ``LLM``."""
    llm = oracle()
    lengths, topics = [1, 7, long // 2, long, long], ["a fox", "两只狐狸", "the sea", "a 🦊", "bread", "月亮"]
    return [
        answered(llm, topics[i % len(topics)], lengths[i % len(lengths)], chat=i % 2 == 1, stream=i % 4 != 2)
        for i in range(kinds)
    ]


@functools.cache
def oracle() -> LLM:
    """Who knows the right answers."""
    return LLM(num_gpu_blocks_override=400)


@functools.cache
def endless() -> Question:
    """A stream of many seconds where many are asked for."""
    return answered(oracle(), "the sea", 1500, chat=True, stream=True)


def answered(llm: LLM, topic: str, tokens: int, chat: bool, stream: bool) -> Question:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    own = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    if chat:
        messages = [{"role": "user", "content": f"Tell me a story about {topic}."}]
        (output,) = llm.chat(messages, params, use_tqdm=False)
        path, body = "/chat/completions", {"messages": messages}
    else:
        prompt = f"The story of {topic}:"
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        path, body = "/completions", {"prompt": prompt}
    made = output.outputs[0]
    return Question(path, body | own, made.text, str(made.finish_reason))


# --- One client -----------------------------------------------------------------------------------------------------


class Client:
    """A connection a request, as ``aiohttp`` makes them.

    Args:
        buffer: bytes that a connection reads ahead.
    """

    def __init__(self, url: str, buffer: int = 2**16) -> None:
        self._url = url
        self.gap = 0.0
        """Seconds of the longest pause between two pieces of a stream so far."""

        def narrow(address: Any) -> socket.socket:
            made = socket.socket(address[0], address[1], address[2])
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            return made

        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=narrow)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=buffer)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self, question: Question, *, leave: int | None = None, pause: float = 0.0, began: asyncio.Event | None = None
    ) -> Heard:
        """Ask, and hear it to its end.

        Args:
            leave: go away after so many events.
            pause: read ``SIP`` bytes at a time, with so many seconds between.
            began: is set when the first event comes.
        """
        try:
            async with asyncio.timeout(HANGS), self._session.post(self._url + question.path, json=question.body) as got:
                if got.status != 200:
                    return await _refused(got)
                if not question.body["stream"]:
                    return _judged(question, *_whole(await got.json()))
                return await self._hear(got, question, leave, pause, began)
        except TimeoutError:
            return Heard(Outcome.LOST, "nothing came any more")
        except aiohttp.ClientConnectorError as error:
            return Heard(Outcome.REFUSED, str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            return Heard(Outcome.BROKEN, repr(error))

    async def _hear(
        self,
        got: aiohttp.ClientResponse,
        question: Question,
        leave: int | None,
        pause: float,
        began: asyncio.Event | None,
    ) -> Heard:
        text, reason, words = "", None, ""
        count, last = 0, time.monotonic()
        async for data in _events(got, pause):
            count, before, last = count + 1, last, time.monotonic()
            if count > 1:
                self.gap = max(self.gap, last - before)
            if began:
                began.set()
            if count == leave:
                if random.random() < 0.5 and got.connection and got.connection.transport:
                    got.connection.transport.abort()
                return Heard(Outcome.LEFT)
            if data == "[DONE]":
                if words:
                    right = question.text.startswith(text)
                    return Heard(Outcome.FAILED, words) if right else Heard(Outcome.WRONG, f"{words}, after {text!r}")
                return _judged(question, text, reason)
            event = json.loads(data)
            if "error" in event:
                words = event["error"]["message"]
            else:
                more, ended = _piece(event)
                text, reason = text + more, reason or ended
        return Heard(Outcome.LOST, f"a clean end after {count} events and {text!r}")


async def _events(got: aiohttp.ClientResponse, pause: float) -> AsyncIterator[str]:
    held = b""
    while True:
        read = await (got.content.read(SIP) if pause else got.content.readany())
        if not read:
            return
        *whole, held = (held + read).split(b"\n\n")
        for event in whole:
            yield event.decode().removeprefix("data: ")
        if pause:
            await asyncio.sleep(pause)


async def _refused(got: aiohttp.ClientResponse) -> Heard:
    error = (await got.json())["error"]
    if got.status in (429, 503):
        told = Outcome.REFUSED if "retry-after" in got.headers else Outcome.WRONG
        return Heard(told, error["message"], got.status)
    return Heard(Outcome.FAILED, error["message"], got.status)


def _piece(event: dict[str, Any]) -> tuple[str, str | None]:
    (choice,) = event["choices"]
    text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text, choice["finish_reason"]


def _whole(answer: dict[str, Any]) -> tuple[str, str | None]:
    (choice,) = answer["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]


def _judged(question: Question, text: str, reason: str | None) -> Heard:
    if reason is None:
        return Heard(Outcome.LOST, "an end without a reason")
    if (text, reason) != (question.text, question.reason):
        return Heard(Outcome.WRONG, f"{text!r} ({reason}), not {question.text!r} ({question.reason})")
    return Heard(Outcome.RIGHT)


# --- One server -----------------------------------------------------------------------------------------------------


async def page(served: Served) -> dict[str, float]:
    """The metrics, each summed over its labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{served.root}/metrics") as got:
        text = await got.text()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


async def soon(check: Callable[[], Awaitable[None]], limit: float = TO_SETTLE) -> None:
    """Try until it holds: nobody tells when a process has put something away."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return await check()
        except (AssertionError, KeyError, aiohttp.ClientError, OSError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


async def ready(served: Served) -> bool:
    """Whether the server takes requests."""
    async with aiohttp.ClientSession() as session, session.get(f"{served.root}/ready") as got:
        return got.status == 200


async def started(served: Served) -> None:
    """Assert that the server takes requests."""
    assert await ready(served)


async def settled(served: Served) -> None:
    """Wait until nothing runs, waits, is open or holds a block any more."""

    async def check() -> None:
        found = await page(served)
        left = {name: found[f"penstock:{name}"] for name in KEPT}
        assert not any(left.values()), left
        assert found["penstock:kv_blocks"] > 0, "an engine is there to tell"

    await soon(check)


def possessions(served: Served) -> dict[str, int]:
    """The most files and threads that a process of each kind has."""
    found: dict[str, int] = {}
    for kind, pids in {
        "supervisor": [served.pid],
        **{kind: pids for kind, pids in served.pids.items() if pids},
    }.items():
        for name, numbers in zip(
            ("files", "threads"), zip(*map(count_files_and_threads, pids), strict=True), strict=True
        ):
            found[f"{name} of {kind}"] = max(numbers)
    return found


@asynccontextmanager
async def server(
    asked: Sequence[Question], *arguments: str, held: float = HELD, shared: Served | None = None
) -> AsyncIterator[Served]:
    """A server that has, after a storm, what it had before: its files, its threads, all its blocks; no event loop of
    its was held for longer than ``held`` seconds at a time.

    Args:
        arguments: of ``penstock serve``, where it is started for this storm.
        shared: one that goes on, in place of a new one.
    """
    with nullcontext(shared) if shared else Served(*ROOM, *arguments) as served:
        await warm(served, asked)
        before, at = possessions(served), len(served.lines)
        yield served
        log = [line for line in served.lines[at:] if (found := re.search(HOLD, line)) and float(found[1]) > held]
        assert not log, log
        if served.running:
            await warm(served, asked)

            async def same() -> None:
                now = possessions(served)
                most = {name: before.get(name, 0) + UNSTARTED.get(name, 0) for name in now}
                grown = {name: (before.get(name, 0), now[name]) for name in now if now[name] > most[name]}
                assert not grown, grown

            await soon(same)


async def warm(served: Served, asked: Sequence[Question]) -> None:
    """Have every process answer what of it is short, in each way, and encode long texts in threads."""
    long = Question("/completions", {"prompt": "long " * 3000, "max_tokens": 1, "stream": False}, "", "")
    short = [question for question in asked if question.body["max_tokens"] < 10]

    async def check() -> None:
        async with Client(served.url) as client:
            heard = await crowd(16, 4, lambda i: client.ask(short[i % len(short)]))
            assert all(one.outcome is Outcome.RIGHT for one in heard), heard
            for one in await crowd(8, 4, lambda _: client.ask(long)):
                assert one.status == 400, one

    await soon(check, START_TIMEOUT)
    await settled(served)


async def crowd(count: int, width: int, ask: Callable[[int], Awaitable[Heard]]) -> list[Heard]:
    """So many requests, ``width`` of them at a time."""
    places = asyncio.Semaphore(width)

    async def one(number: int) -> Heard:
        async with places:
            return await ask(number)

    return await asyncio.gather(*map(one, range(count)))


@asynccontextmanager
async def load(served: Served, asked: Sequence[Question], count: int) -> AsyncIterator[list[asyncio.Task[Heard]]]:
    """So many streams that have all begun."""
    async with Client(served.url) as client:
        began = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(client.ask(asked[i % len(asked)], began=event)) for i, event in enumerate(began)]
        try:
            async with asyncio.timeout(HANGS):
                await asyncio.gather(*(event.wait() for event in began))
            yield tasks
        finally:
            for task in tasks:
                task.cancel()


async def ask_all(tally: Tally, served: Served, asked: Sequence[Question], count: int) -> None:
    """Ask that many more, all at once."""
    async with Client(served.url) as client:
        tally.heard += await crowd(count, count, lambda i: client.ask(asked[i % len(asked)]))


def unending(question: Question, stream: bool = True) -> Question:
    """One that keeps the engine busy for much longer than anybody waits until all is put away."""
    return replace(question, body=question.body | {"n": 4, "max_tokens": 1900, "stream": stream})


def long_ones(asked: Sequence[Question]) -> list[Question]:
    most = max(question.body["max_tokens"] for question in asked)
    return [question for question in asked if question.body["stream"] and question.body["max_tokens"] == most]


def run(scenario: Coroutine[Any, Any, Tally], limit: float = 300) -> Tally:
    """Run one of the scenarios, which must come to its end."""
    return asyncio.run(asyncio.wait_for(scenario, limit))


# --- Scenarios ------------------------------------------------------------------------------------------------------


async def leaving(
    asked: Sequence[Question], count: int, width: int = 64, seed: int = 1, shared: Served | None = None
) -> Tally:
    """Clients go away at any moment, before and in the middle of their streams, while others stay."""
    tally, rng = Tally("clients who leave"), random.Random(seed)
    plan = [rng.choice((None, None, 0, 1, 2, 5, 20)) for _ in range(count)]
    async with server(asked, shared=shared) as served, Client(served.url) as client:

        async def ask(number: int) -> Heard:
            question, leave = asked[number % len(asked)], plan[number]
            if leave is None:
                return await client.ask(question)
            endless = unending(question, stream=bool(leave))
            if leave:
                return await client.ask(endless, leave=leave)
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 0.1)):
                    return await client.ask(endless)
            return Heard(Outcome.LEFT)

        tally.heard = await crowd(count, width, ask)
    tally.only(Outcome.RIGHT, Outcome.LEFT)
    return tally


async def reading(
    asked: Sequence[Question], slow: int, silent: int, others: int, pause: float = 0.001, shared: Served | None = None
) -> Tally:
    """Clients read a few bytes at a time, or never: who never reads is dropped after ``--client-timeout``."""
    tally = Tally("slow and silent readers")
    loud = [Question(q.path, q.body | LOUD[q.path], q.text, q.reason) for q in long_ones(asked)]
    async with (
        server(asked, "--client-timeout", "2", shared=shared) as served,
        Client(served.url, buffer=4096) as narrow,
        Client(served.url) as wide,
    ):
        parts = await asyncio.gather(
            crowd(slow, slow, lambda i: narrow.ask(loud[i % len(loud)], pause=pause)),
            crowd(silent, silent, lambda _: never_reading(served)),
            crowd(others, 16, lambda i: wide.ask(asked[i % len(asked)])),
        )
        tally.heard = [heard for part in parts for heard in part]
    tally.only(Outcome.RIGHT, Outcome.BROKEN)
    assert tally.counts[Outcome.BROKEN] == silent
    return tally


async def never_reading(served: Served) -> Heard:
    """Ask for more than sockets can hold, and look at what came only when nothing is open any more."""
    prompts = [[token] * 2000 for token in range(4)]
    body = {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 40, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", int(served.root.rpartition(":")[2])))
    with made:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        made.sendall(head.encode() + content)
        await asyncio.to_thread(made.recv, 1, socket.MSG_PEEK)  # until then the request may not be counted as open

        async def dropped() -> None:
            assert (await page(served))["penstock:num_requests_open"] == 0

        try:
            await soon(dropped, HANGS)
            made.settimeout(30)
            while heard := made.recv(2**16):
                if b"[DONE]" in heard:
                    return Heard(Outcome.WRONG, "it all fitted in")
        except (AssertionError, TimeoutError):
            return Heard(Outcome.LOST, "still connected")
        except ConnectionError as error:
            return Heard(Outcome.BROKEN, repr(error))
    return Heard(Outcome.BROKEN, "the connection was closed")


async def connections(asked: Sequence[Question], count: int, *arguments: str, shared: Served | None = None) -> Tally:
    """So many connections at once; past the queue they are refused."""
    tally = Tally(f"{count:,} connections at once" + "".join(f", {word}" for word in [" ".join(arguments)] if word))
    async with server(asked, *arguments, shared=shared) as served, Client(served.url) as client:
        tally.heard = await crowd(count, count, lambda i: client.ask(asked[i % len(asked)]))
    tally.only(Outcome.RIGHT, Outcome.REFUSED)
    assert all(one.status == 429 for one in tally.heard if one.outcome is Outcome.REFUSED)
    return tally


async def engine_killed(asked: Sequence[Question], count: int, times: int = 2, shared: Served | None = None) -> Tally:
    """kill -9 of the engine under load: its streams are told at once, and new requests are answered soon."""
    tally = Tally(f"kill -9 of the engine, {times} times")
    async with server(asked, shared=shared) as served:
        for _ in range(times):
            async with load(served, long_ones(asked), count) as tasks:
                (engine,) = served.pids["engine"]
                os.kill(engine, signal.SIGKILL)
                killed = time.monotonic()
                tally.heard += await asyncio.gather(*tasks)
                tally.slowest = max(tally.slowest, time.monotonic() - killed)
                tally.at_once &= not await ready(served)
            await warm(served, asked)
            await ask_all(tally, served, asked, count)
    tally.only(Outcome.RIGHT, Outcome.FAILED)
    assert tally.counts[Outcome.FAILED]
    return tally


async def greedy(
    asked: Sequence[Question], count: int, n: int = 128, held: float = HELD, shared: Served | None = None
) -> Tally:
    """Some want more than all others together, many sequences with all log probabilities: the others' streams flow on,
    ``/live`` answers, and no API process's event loop is held."""
    tally = Tally("greedy clients")
    want = {"n": n, "temperature": 1, "max_tokens": 20, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    (question, *_) = long_ones(asked)
    async with (
        server(asked, "--num-gpu-blocks-override", "20000", held=held, shared=shared) as served,
        aiohttp.ClientSession() as session,
        Client(served.url) as client,
    ):

        async def take(number: int) -> Heard:
            stream = number % 2 == 0
            body = {"messages": [{"role": "user", "content": f"Number {number}"}], "stream": stream, **want}
            async with session.post(f"{served.url}/chat/completions", json=body) as got:
                assert got.status == 200
                end = b""
                async for part in got.content.iter_any():
                    end = (end + part)[-16:]
                return Heard(Outcome.RIGHT if end.endswith(b"[DONE]\n\n" if stream else b"}") else Outcome.WRONG)

        async def look() -> None:
            at = time.monotonic()
            async with session.get(f"{served.root}/live") as got:
                assert got.status == 200
            tally.live = max(tally.live, time.monotonic() - at)
            await asyncio.sleep(0.02)

        async def others() -> list[Heard]:
            heard = []
            while not all(task.done() for task in taking):
                heard.append(await client.ask(question))
            return heard

        taking = [asyncio.create_task(take(number)) for number in range(count)]
        streams = [asyncio.create_task(others()) for _ in range(20)]
        while not all(task.done() for task in streams):
            await look()
        tally.heard = [heard for stream in streams for heard in stream.result()]
        tally.heard += [task.result() for task in taking]
        tally.gap = client.gap
    tally.only(Outcome.RIGHT)
    return tally


async def pipelined(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """One connection asks thousands of times without hearing, and is answered in order; others do not wait for it."""
    tally = Tally("pipelined requests")
    async with server(asked, shared=shared) as served, Client(served.url) as client:
        body = json.dumps({"tokens": [1, 2, 3]})
        ask = f"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.root.rpartition(":")[2]))
        writer.write(ask.encode() * count)
        heard = asyncio.create_task(_answers(reader, count))
        tally.heard = await crowd(len(asked), 4, lambda i: client.ask(asked[i % len(asked)]))
        assert await heard == count
        writer.close()
    tally.only(Outcome.RIGHT)
    return tally


async def _answers(reader: asyncio.StreamReader, count: int) -> int:
    """How many of so many answers come, each whole."""
    for number in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        if b" 200 " not in head or b"prompt" not in await reader.readexactly(int(length.split(b":")[1])):
            return number
    return count


async def engine_hung(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGSTOP of the engine under load: ``/health`` says so, it is killed, its streams are told, and it comes back."""
    tally, long = Tally("an engine that hangs"), endless()
    async with server(asked, "--engine-iteration-timeout", "4", shared=shared) as served:
        async with load(served, [long], count) as tasks, aiohttp.ClientSession() as session:
            (engine,) = served.pids["engine"]
            os.kill(engine, signal.SIGSTOP)
            stopped = time.monotonic()

            async def unhealthy() -> None:
                async with session.get(f"{served.root}/health") as health, session.get(f"{served.root}/live") as live:
                    assert (health.status, live.status) == (503, 200)
                    assert "has not answered" in await health.text()
                assert (await page(served))["penstock:engine_heartbeat_age_seconds"] >= 1

            await soon(unhealthy)
            tally.heard = await asyncio.gather(*tasks)
            tally.slowest = time.monotonic() - stopped
            await asyncio.to_thread(served.find, rf"process {engine}\) has not answered for \d+ seconds: killed")
        await warm(served, asked)
        await ask_all(tally, served, asked, count)
    tally.only(Outcome.RIGHT, Outcome.FAILED)
    assert tally.counts[Outcome.FAILED]
    return tally


async def api_killed(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """kill -9 of one of two API processes under load: its connections break, others go on, and it comes back."""
    tally = Tally("kill -9 of an API process")
    endless = [unending(question) for question in asked]
    async with server(asked, "--api-server-count", "2", shared=shared) as served:
        async with load(served, long_ones(asked), count) as tasks, load(served, endless, count // 2) as more:
            killed = served.pids["api"][0]
            os.kill(killed, signal.SIGKILL)
            tally.heard = await asyncio.gather(*tasks)
            tally.heard += [task.result() if task.done() else Heard(Outcome.LEFT) for task in more]

        async def back() -> None:
            now = served.pids["api"]
            assert len(now) == 2
            assert killed not in now

        await soon(back)
        await warm(served, asked)  # the new one refuses requests until it has heard of the engine
        await ask_all(tally, served, asked, count)
    tally.only(Outcome.RIGHT, Outcome.BROKEN, Outcome.LEFT)
    return tally


async def api_held_up(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """An API process stands still for so long that the engine gives it up: its clients are told."""
    tally, long = Tally("an API process that stands still"), endless()
    async with server(asked, shared=shared) as served:
        async with load(served, [long], count) as tasks:
            (api,) = served.pids["api"]
            at = len(served.lines)
            os.kill(api, signal.SIGSTOP)
            try:
                await asyncio.to_thread(served.find, "has sent nothing for", at, 4 * engine_messages.CLIENT_TIMEOUT)
            finally:
                os.kill(api, signal.SIGCONT)
            tally.heard = await asyncio.gather(*tasks)
        await ask_all(tally, served, asked, count)
    tally.only(Outcome.RIGHT, Outcome.FAILED)
    return tally


async def drained(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGTERM under load: what was taken on is answered, new requests are refused, and it ends with status 0."""
    tally = Tally("SIGTERM")
    async with (
        server(asked, shared=shared) as served,
        load(served, long_ones(asked), count) as tasks,
        Client(served.url) as client,
    ):
        served.terminate()
        served.find("stopping")
        late = asyncio.create_task(keep_asking(client, asked, tasks))
        tally.heard = await asyncio.gather(*tasks)
        refused = await late
        assert await asyncio.to_thread(served.ended) == 0
    tally.only(Outcome.RIGHT)
    tally.heard += refused
    tally.only(Outcome.RIGHT, Outcome.REFUSED)
    return tally


async def keep_asking(client: Client, asked: Sequence[Question], tasks: Iterable[asyncio.Task[Heard]]) -> list[Heard]:
    """Ask again and again until all others have been answered."""
    heard = []
    while not all(task.done() for task in tasks):
        heard.append(await client.ask(asked[len(heard) % len(asked)]))
        await asyncio.sleep(0.01)
    return heard


async def cut_short(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """SIGTERM with too little time to drain: streams end with an error, and the status is 0."""
    tally = Tally("SIGTERM, --drain-timeout 0.2")
    async with (
        server(asked, "--drain-timeout", "0.2", shared=shared) as served,
        load(served, [endless()], count) as tasks,
    ):
        served.terminate()
        told = time.monotonic()
        tally.heard = await asyncio.gather(*tasks)
        tally.slowest = time.monotonic() - told
        assert await asyncio.to_thread(served.ended) == 0
    tally.only(Outcome.RIGHT, Outcome.FAILED)
    assert tally.counts[Outcome.FAILED]
    return tally


async def overload(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """Past the queue requests are refused at once, while what was taken on goes on."""
    tally, taken = Tally("overload: 4 run, 8 wait"), 12
    async with (
        server(asked, "--max-num-seqs", "4", "--max-waiting", "8", shared=shared) as served,
        Client(served.url) as client,
    ):
        long, began = long_ones(asked), asyncio.Event()

        async def flood(number: int) -> Heard:
            at = time.monotonic()
            heard = await client.ask(asked[number % len(asked)])
            if heard.outcome is Outcome.REFUSED:
                tally.slowest = max(tally.slowest, time.monotonic() - at)
            return heard

        first = [asyncio.create_task(client.ask(long[i % len(long)], began=began)) for i in range(taken)]
        await began.wait()
        tally.heard = await crowd(count, count, flood)
        assert all(one.status == 429 for one in tally.heard if one.outcome is Outcome.REFUSED)
        assert tally.counts[Outcome.REFUSED]
        tally.heard += await asyncio.gather(*first)
    tally.only(Outcome.RIGHT, Outcome.REFUSED)
    return tally


async def given_up(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """The engine dies three times in a row: clients are told each time, and the server ends with status 1. It is killed
    again as soon as it answers, since a busy machine has to do this within the minute in which deaths are counted."""
    tally = Tally("the engine killed three times")
    async with server(asked, shared=shared) as served:
        for streams in (count, 1, 1):
            await soon(lambda: started(served), START_TIMEOUT)
            async with load(served, long_ones(asked), streams) as tasks:
                (engine,) = served.pids["engine"]
                os.kill(engine, signal.SIGKILL)
                tally.heard += await asyncio.gather(*tasks)
        assert await asyncio.to_thread(served.ended) == 1
    tally.only(Outcome.RIGHT, Outcome.FAILED)
    assert tally.counts[Outcome.FAILED] >= 3
    return tally


async def orphaned(asked: Sequence[Question], count: int, shared: Served | None = None) -> Tally:
    """kill -9 of the supervisor: connections break, and no process is left."""
    tally = Tally("kill -9 of the supervisor")
    async with server(asked, shared=shared) as served, load(served, long_ones(asked), count) as tasks:
        os.kill(served.pid, signal.SIGKILL)
        tally.heard = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(served.ended) == -signal.SIGKILL
    tally.only(Outcome.RIGHT, Outcome.BROKEN)
    return tally
