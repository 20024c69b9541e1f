"""Forms as they are asked for: compiled by the backend that was chosen, each once."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError, Vocabulary
from penstock.core.errors import invalid

from .added_tokens import AddedTokens
from .guide import Backend, Grammar
from .tokens import added_tokens, check_text, read_tokens

logger = logging.getLogger(__name__)

BACKENDS = {
    "auto": (".by_llguidance", "LLGuidance"),
    "llguidance": (".by_llguidance", "LLGuidance"),
    "xgrammar": (".by_xgrammar", "XGrammar"),
}
"""Where they are; only the one that was chosen is loaded."""
KEPT = 256
"""Compiled forms that are kept for the next request with the same."""
MOST_BYTES = 2**30
"""Of the compiled forms that are kept."""
STACK = 256 * 2**20
"""Bytes of the stack that forms are compiled on; memory is taken where it is used."""


def check_backend(name: str) -> None:
    """Raises ``PenstockError`` (``invalid``) for a backend that is not installed."""
    if name == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise invalid("guided_decoding_backend", "xgrammar is not installed: pip install 'penstock-llm[xgrammar]'")


class Guides:
    """Compiles forms in a thread of its own, and keeps those that were asked for last.

    Args:
        backend: ``off`` refuses all, ``auto`` is ``llguidance``.
        size: of the model's vocabulary.
    """

    def __init__(self, backend: str, size: int) -> None:
        self._off = backend == "off"
        self._size = size
        self._vocabulary: Vocabulary | None = None
        self._own: AddedTokens | None = None
        """Texts that are tokens of their own; None until the backend knows the tokens."""
        self._unreadable: Failure | None = None
        """Why it cannot know them."""
        self._prepared: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "compile")
        before = threading.stack_size(STACK)  # references can be chained as deep as a form is long
        try:
            # begun at once: what a backend loads can take seconds
            self._backend = self._thread.submit(_load, *BACKENDS["llguidance" if self._off else backend])
        finally:
            threading.stack_size(before)
        self._compiled: OrderedDict[GuidedDecodingParams, Future[Grammar]] = OrderedDict()

    def learn(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """What the model's tokens spell; it is the same for all who tell."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary()

    def prepare(self) -> None:
        """Read what tokens spell before a form asks for it. To be called while nothing runs: llguidance holds Python's
        global lock meanwhile, for one or two seconds where there are 150,000 tokens."""
        if self._vocabulary and not self._off and self._prepared is None:
            self._prepared = self._thread.submit(self._read)

    def compile(self, params: GuidedDecodingParams) -> Future[Grammar]:
        """A form, compiled now or before. Its future raises ``PenstockError`` where it cannot be kept to.

        Raises ``PenstockError`` (``unsupported``) where guided decoding is off.
        """
        if self._off:
            raise PenstockError(Code.UNSUPPORTED, "guided decoding is off (guided_decoding_backend)", params.field)
        if self._vocabulary is None:
            raise PenstockError(Code.UNAVAILABLE, "the engine does not know what its tokens spell")
        if (found := self._compiled.get(params)) is None or found.cancelled() or _broken(found):
            self._make_room()
            found = self._compiled[params] = self._thread.submit(self._compile, params)
        self._compiled.move_to_end(params)
        return found

    def _make_room(self) -> None:
        taken = sum(map(_size, self._compiled.values()))
        while len(self._compiled) >= KEPT or taken > MOST_BYTES:
            taken -= _size(self._compiled.popitem(last=False)[1])

    def _compile(self, params: GuidedDecodingParams) -> Grammar:
        self._read()
        if self._own is None:
            assert self._unreadable
            raise PenstockError(Code.UNSUPPORTED, f"{params.field}: {self._unreadable.message}", params.field)
        try:
            check_text(params, self._own.tokens)
            return self._backend.result().compile(params)
        except RecursionError as error:
            raise invalid(params.field, "is nested too deeply") from error

    def _read(self) -> None:
        """Once, be it that it fails."""
        if self._own or self._unreadable:
            return
        assert self._vocabulary is not None
        begun = time.monotonic()
        try:
            own = added_tokens(self._vocabulary)
            self._backend.result().learn(read_tokens(self._vocabulary, self._size), own)
        except PenstockError as error:
            self._unreadable = error.failure
        else:
            self._own = own
            logger.info("guided decoding knows what tokens spell, after %.2f seconds", time.monotonic() - begun)


def _load(module: str, name: str) -> Backend:
    backend: Backend = getattr(importlib.import_module(module, __package__), name)()
    return backend


def _broken(form: Future[Grammar]) -> bool:
    """Whether it is not the form's fault that there is none."""
    error = form.exception() if form.done() else None
    return error is not None and (not isinstance(error, PenstockError) or error.failure.code is Code.INTERNAL)


def _size(form: Future[Grammar]) -> int:
    return form.result().size if form.done() and not form.cancelled() and not form.exception() else 0
