"""Tokenization by the measured server: ``POST /tokenize`` of Penstock and vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from penstock.core import Code, PenstockError

from .sse import error_message

CONCURRENCY = 16


class Tokenized(msgspec.Struct):
    tokens: list[int]


class ServerTokenizer:
    """Tokenizer of a model on a server.

    Args:
        url: URL of ``/tokenize``.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model
        self._free = asyncio.Semaphore(CONCURRENCY)

    async def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without special tokens. Raises ``PenstockError`` if the server has no
        ``/tokenize``."""
        bodies = [{"prompt": text, "add_special_tokens": False} for text in texts]
        return [len(tokens) for tokens in await asyncio.gather(*map(self._tokenize, bodies))]

    async def render(self, texts: Sequence[str], template_kwargs: dict[str, Any]) -> list[list[int]]:
        """Token ids of each text as a user's message, with the chat template. Raises ``PenstockError`` as ``count``."""
        more = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        bodies = [{"messages": [{"role": "user", "content": text}], **more} for text in texts]
        return await asyncio.gather(*map(self._tokenize, bodies))

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        data = msgspec.json.encode({"model": self._model, **body})
        try:
            async with self._free, self._session.post(self._url, data=data) as response:
                answer = await response.read()
            if response.status != 200:
                problem = f"returned status {response.status}: {error_message(answer)}"
                raise PenstockError(Code.UNSUPPORTED, f"{self._url}, which counts tokens, {problem}", "dataset_name")
            return msgspec.json.decode(answer, type=Tokenized).tokens
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise PenstockError(Code.UNAVAILABLE, f"{self._url}, which counts tokens, failed: {error}") from error
