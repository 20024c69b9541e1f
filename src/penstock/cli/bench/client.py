"""Sending and measuring streamed requests, one or many on a schedule."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from penstock.core import Code, PenstockError

from . import prompts
from .sample import Outcome, Sample
from .sse import DONE, Chunk, EventReader, decode_chunk, error_message
from .workload import Request

AHEAD = 0.25  # seconds before its time that a request's prompt is made
CONNECT_TIMEOUT = 30.0  # seconds; responses have no time limit
KEEPALIVE = 3.0  # seconds; servers close idle connections (uvicorn after 5), and a request sent at that moment is lost


class Client:
    """Sends requests to one model at one address.

    Args:
        base_url: the server's, without ``/v1``.
        endpoint: ``/v1/completions`` gets prompts as token ids, anything that ends in ``/chat/completions`` as words.
        body: fields that every request has besides prompt, length and streaming.
        headers: sent with every request.
        seed: of the prompts' content.
        vocab_size: token ids stay below it.
    """

    def __init__(
        self, base_url: str, endpoint: str, body: dict[str, Any], headers: dict[str, str], seed: int, vocab_size: int
    ) -> None:
        self.url = base_url + endpoint
        self._base_url = base_url
        self._chat = endpoint.endswith("/chat/completions")
        self._body = {"stream": True, "stream_options": {"include_usage": True}} | body
        self._seed, self._vocab_size = seed, vocab_size
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            headers={"Content-Type": "application/json"} | headers,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The name of the model to request: that of the body, or else the first of ``/v1/models``.

        Raises:
            PenstockError: nothing answers there, or no list of models.
        """
        if "model" not in self._body:
            url = f"{self._base_url}/v1/models"
            try:
                async with self._session.get(url) as response:
                    answer = await response.read()
                self._body["model"] = msgspec.json.decode(answer)["data"][0]["id"]
            except (aiohttp.ClientError, OSError) as error:
                raise PenstockError(
                    Code.UNAVAILABLE, f"no server answers at {self._base_url}: {_describe_error(error)}"
                ) from error
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                message = f"{url} lists no model, name one with --model: {response.status} {error_message(answer)}"
                raise PenstockError(Code.NOT_FOUND, message) from error
        return str(self._body["model"])

    async def send_all(
        self, requests: Sequence[Request], concurrency: int, tell: Callable[[Sample], object] = lambda _: None
    ) -> list[Sample]:
        """Send each when it is due, or as soon after as fewer than ``concurrency`` are running; 0 is no limit.

        Args:
            tell: called with each sample when it is complete.

        Returns:
            The samples in the order of the requests.
        """
        started = time.perf_counter() + AHEAD  # so that the first ones are ready as well
        samples = [Sample(request.input_len) for request in requests]
        queue = iter(zip(requests, samples, strict=True))

        async def work() -> None:
            free = 0.0
            for request, sample in queue:
                sample.due = max(request.at, free)
                await _sleep_until(started + sample.due - AHEAD)
                body = self._encode(request)
                await _sleep_until(started + sample.due)
                await self._measure(body, sample, started)
                free = time.perf_counter() - started
                tell(sample)

        await asyncio.gather(*[work() for _ in range(min(concurrency or len(requests), len(requests)))])
        return samples

    def _encode(self, request: Request) -> bytes:
        content: dict[str, Any]
        if self._chat:
            content = {"messages": [{"role": "user", "content": prompts.words(request.pieces, self._seed)}]}
        else:
            content = {"prompt": prompts.ids(request.pieces, self._seed, self._vocab_size)}
        return msgspec.json.encode(self._body | content | {"max_tokens": request.output_len})

    async def _measure(self, body: bytes, sample: Sample, started: float) -> None:
        sample.sent = time.perf_counter() - started
        try:
            async with self._session.post(self.url, data=body) as response:
                if response.status == 200:
                    await _listen(response, sample, started)
                else:
                    sample.outcome = Outcome.REFUSED if response.status in (429, 503) else Outcome.FAILED
                    sample.reason = f"{response.status} {error_message(await response.read())}"
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            sample.outcome, sample.reason = Outcome.FAILED, _describe_error(error)
        if sample.outcome is not Outcome.OK:
            sample.last = time.perf_counter() - started


async def _listen(response: aiohttp.ClientResponse, sample: Sample, started: float) -> None:
    """Read the answer to its end, which is a finish reason: a stream that stops without one failed."""
    reader, finished = EventReader(), False
    async for received in response.content.iter_any():
        now = time.perf_counter() - started
        for payload in reader.feed(received):
            if payload == DONE:
                continue
            chunk = decode_chunk(payload)
            if chunk.error:
                sample.reason = error_message(payload)
                return
            finished |= _note(chunk, sample, now)
    if not finished:
        sample.reason = "the stream stopped before its end"
        return
    if not sample.counted:
        sample.output_tokens = len(sample.chunks)
    sample.outcome = Outcome.OK


def _note(chunk: Chunk, sample: Sample, now: float) -> bool:
    """Add what came at this moment to the sample; returns whether a finish reason was in it."""
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        sample.counted = True
        sample.input_tokens, sample.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        sample.cached_tokens = (details and details.cached_tokens) or 0
    finished = False
    for choice in chunk.choices:
        finished |= choice.finish_reason is not None
        sample.last = now
        if choice.has_text or (finished and not sample.chunks):  # an answer whose tokens are no text ends all the same
            sample.chunks.append(now)
    return finished


def _describe_error(error: Exception) -> str:
    """The message of an error; for aiohttp's errors, that of the operating system."""
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


async def _sleep_until(moment: float) -> None:
    seconds = moment - time.perf_counter()
    if seconds > 0:
        await asyncio.sleep(seconds)
