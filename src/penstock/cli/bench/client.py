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
from .server_tokenizer import ServerTokenizer
from .sse import DONE, Chunk, EventReader, decode_chunk, error_message
from .workload import Request

AHEAD = 0.25  # seconds before the scheduled time at which a request's prompt is generated
CONNECT_TIMEOUT = 30.0  # seconds; responses have no time limit
KEEPALIVE = 3.0  # seconds; less than servers' timeouts (uvicorn: 5), as a request sent during the close would be lost


class Client:
    """Sends requests to one model of a server.

    Args:
        base_url: URL of the server, without ``/v1``.
        endpoint: path of the API.
        kind: API: ``openai`` (prompts are token ids), ``openai-chat`` (text) or ``openai-embeddings`` (token ids).
        body: additional fields of all requests.
        headers: headers of all requests.
        seed: seed of the prompts.
        vocab_size: upper bound of token ids, exclusive.
        request_id_prefix: prefix of the header ``X-Request-Id``; empty: no header.
        insecure: accept any certificate.
        keep_text: store the output in the samples.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        body: dict[str, Any],
        headers: dict[str, str],
        seed: int,
        vocab_size: int,
        *,
        kind: str = "openai",
        request_id_prefix: str = "",
        insecure: bool = False,
        keep_text: bool = False,
    ) -> None:
        self.url = base_url + endpoint
        self._base_url, self._kind = base_url, kind
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        self._body = ({} if kind == "openai-embeddings" else streamed) | body
        self._seed, self._vocab_size = seed, vocab_size
        self._id_prefix, self._keep_text = request_id_prefix, keep_text
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE, ssl=not insecure),
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

    def tokenizer(self, model: str) -> ServerTokenizer:
        """The server's tokenizer."""
        return ServerTokenizer(self._session, f"{self._base_url}/tokenize", model)

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
        samples = [Sample(request.input_len, request.at, text=[] if self._keep_text else None) for request in requests]
        queue = iter(zip(requests, samples, range(len(requests)), strict=True))

        async def work() -> None:
            free = 0.0
            for request, sample, number in queue:
                sample.due = max(request.at, free)
                await _sleep_until(started + sample.due - AHEAD)
                body = self._encode(request)
                await _sleep_until(started + sample.due)
                await self._measure(body, sample, started, self._request_headers(number))
                free = time.perf_counter() - started
                on_complete(sample)

        await asyncio.gather(*[work() for _ in range(min(concurrency or len(requests), len(requests)))])
        return samples

    def _encode(self, request: Request) -> bytes:
        model = {"model": request.model} if request.model else {}
        length = {} if self._kind == "openai-embeddings" else {"max_tokens": request.output_len}
        return msgspec.json.encode(self._body | self._prompt(request) | length | model)

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self._kind == "openai-chat":
            text = request.text or prompts.text(request.parts, self._seed)
            return {"messages": [{"role": "user", "content": text}]}
        generated = request.text or prompts.token_ids(request.parts, self._seed, self._vocab_size)
        name = "input" if self._kind == "openai-embeddings" else "prompt"
        return {name: request.token_ids or generated}

    def _request_headers(self, number: int) -> dict[str, str]:
        return {"X-Request-Id": f"{self._id_prefix}{number}"} if self._id_prefix else {}

    async def _measure(self, body: bytes, sample: Sample, started: float, headers: dict[str, str]) -> None:
        sample.sent = time.perf_counter() - started
        try:
            async with self._session.post(self.url, data=body, headers=headers) as response:
                if response.status != 200:
                    sample.outcome = Outcome.REFUSED if response.status in (429, 503) else Outcome.FAILED
                    sample.reason = f"{response.status} {error_message(await response.read())}"
                elif self._kind == "openai-embeddings":
                    _read_embeddings(await response.read(), sample)
                    sample.last = time.perf_counter() - started
                else:
                    await _read_stream(response, sample, started)
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            sample.outcome, sample.reason = Outcome.FAILED, _describe_error(error)
        if sample.outcome is not Outcome.OK:
            sample.last = time.perf_counter() - started


def _read_embeddings(body: bytes, sample: Sample) -> None:
    usage = decode_chunk(body).usage
    sample.outcome, sample.counted = Outcome.OK, usage is not None
    if usage is not None:
        sample.input_tokens = usage.prompt_tokens


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
        if sample.text is not None:
            sample.text.append(choice.output)
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
