"""Client that sends streamed requests on a schedule and measures them."""

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

AHEAD = 0.25  # seconds before the scheduled time at which a request's prompt is generated
CONNECT_TIMEOUT = 30.0  # seconds; responses have no time limit
KEEPALIVE = 3.0  # seconds; less than servers' timeouts (uvicorn: 5), as a request sent during the close would be lost


class Client:
    """Sends requests to one model of a server.

    Args:
        base_url: URL of the server, without ``/v1``.
        endpoint: prompts are text if it ends with ``/chat/completions``, otherwise token ids.
        body: additional fields of all requests.
        headers: headers of all requests.
        seed: seed of the prompts.
        vocab_size: upper bound of token ids, exclusive.
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
        """Name of the requested model: ``model`` of the body, or the first model in ``/v1/models``.

        Raises ``PenstockError`` if the server cannot be reached, or lists no models.
        """
        if "model" not in self._body:
            url = f"{self._base_url}/v1/models"
            try:
                async with self._session.get(url) as response:
                    answer = await response.read()
                self._body["model"] = msgspec.json.decode(answer)["data"][0]["id"]
            except (aiohttp.ClientError, OSError) as error:
                raise PenstockError(
                    Code.UNAVAILABLE, f"{self._base_url} does not respond: {_describe_error(error)}"
                ) from error
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                message = f"{url} lists no model: set --model ({response.status} {error_message(answer)})"
                raise PenstockError(Code.NOT_FOUND, message) from error
        return str(self._body["model"])

    async def send_all(
        self, requests: Sequence[Request], concurrency: int, on_complete: Callable[[Sample], object] = lambda _: None
    ) -> list[Sample]:
        """Send each request at its arrival time, or later when fewer than ``concurrency`` (0: no limit) are running.

        Args:
            on_complete: called with each completed sample.

        Returns:
            The samples in the order of the requests.
        """
        started = time.perf_counter() + AHEAD  # time to generate the first prompts
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
                on_complete(sample)

        await asyncio.gather(*[work() for _ in range(min(concurrency or len(requests), len(requests)))])
        return samples

    def _encode(self, request: Request) -> bytes:
        content: dict[str, Any]
        if self._chat:
            content = {"messages": [{"role": "user", "content": prompts.text(request.parts, self._seed)}]}
        else:
            content = {"prompt": prompts.token_ids(request.parts, self._seed, self._vocab_size)}
        return msgspec.json.encode(self._body | content | {"max_tokens": request.output_len})

    async def _measure(self, body: bytes, sample: Sample, started: float) -> None:
        sample.sent = time.perf_counter() - started
        try:
            async with self._session.post(self.url, data=body) as response:
                if response.status == 200:
                    await _read_stream(response, sample, started)
                else:
                    sample.outcome = Outcome.REFUSED if response.status in (429, 503) else Outcome.FAILED
                    sample.reason = f"{response.status} {error_message(await response.read())}"
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            sample.outcome, sample.reason = Outcome.FAILED, _describe_error(error)
        if sample.outcome is not Outcome.OK:
            sample.last = time.perf_counter() - started


async def _read_stream(response: aiohttp.ClientResponse, sample: Sample, started: float) -> None:
    """Read the response into the sample. A stream that ends without a finish reason has failed."""
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
            finished |= _add_chunk(chunk, sample, now)
    if not finished:
        sample.reason = "the stream ended without a finish reason"
        return
    if not sample.counted:
        sample.output_tokens = len(sample.chunks)
    sample.outcome = Outcome.OK


def _add_chunk(chunk: Chunk, sample: Sample, now: float) -> bool:
    """Add a chunk received at time ``now`` to the sample; returns True if it has a finish reason."""
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        sample.counted = True
        sample.input_tokens, sample.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        sample.cached_tokens = (details and details.cached_tokens) or 0
    finished = False
    for choice in chunk.choices:
        finished |= choice.finish_reason is not None
        sample.last = now
        if choice.has_text or (finished and not sample.chunks):  # a response without text gets one chunk
            sample.chunks.append(now)
    return finished


def _describe_error(error: Exception) -> str:
    """Message of an error; for aiohttp's errors, the message of the operating system."""
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


async def _sleep_until(moment: float) -> None:
    seconds = moment - time.perf_counter()
    if seconds > 0:
        await asyncio.sleep(seconds)
