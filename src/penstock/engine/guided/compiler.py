"""The grammar compiler: compiles with the selected backend in a thread, and caches compiled grammars."""

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
from .backend import Backend, Grammar
from .vocabulary import check_no_added_tokens, load_tokenizer, read_added_tokens

logger = logging.getLogger(__name__)

BACKENDS = {
    "auto": (".backend_llguidance", "LLGuidance"),
    "llguidance": (".backend_llguidance", "LLGuidance"),
    "xgrammar": (".backend_xgrammar", "XGrammar"),
}
"""Module and class of each backend; only the selected one is imported."""
MAX_CACHED = 256
"""Compiled grammars that are cached."""
MAX_CACHED_BYTES = 2**30
"""Memory of the cached grammars, bytes."""
STACK_SIZE = 256 * 2**20
"""Stack of the compiler thread, bytes: recursion is as deep as a schema's references. Only used pages take memory."""


def check_backend(name: str) -> None:
    """Raises ``PenstockError`` (``invalid``) for a backend that is not installed."""
    if name == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise invalid("guided_decoding_backend", "xgrammar is not installed: pip install 'penstock-llm[xgrammar]'")


class GrammarCompiler:
    """Compiles grammars in a thread, and caches them.

    Args:
        backend: a name of ``BACKENDS``, or ``off`` to refuse all grammars.
        vocab_size: number of tokens of the model.
    """

    def __init__(self, backend: str, vocab_size: int) -> None:
        self._off = backend == "off"
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._added_tokens: AddedTokens | None = None
        """None until the backend has the vocabulary."""
        self._vocabulary_failure: Failure | None = None
        """Why the backend cannot use the vocabulary."""
        self._preload: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "compile")
        default_stack_size = threading.stack_size(STACK_SIZE)
        try:
            # Imported now: it can take seconds.
            self._backend = self._thread.submit(_load, *BACKENDS["llguidance" if self._off else backend])
        finally:
            threading.stack_size(default_stack_size)
        self._cache: OrderedDict[GuidedDecodingParams, Future[Grammar]] = OrderedDict()

    def set_vocabulary(self, get_vocabulary: Callable[[], Vocabulary]) -> None:
        """Set the model's vocabulary; ``get_vocabulary`` is called where none is set yet."""
        if self._vocabulary is None:
            self._vocabulary = get_vocabulary()

    def preload_vocabulary(self) -> None:
        """Give the backend the vocabulary in the compiler's thread, before the first grammar needs it.

        To be called while the engine is idle: with 150,000 tokens, llguidance holds the GIL for one or two seconds.
        """
        if self._vocabulary and not self._off and self._preload is None:
            self._preload = self._thread.submit(self._load_vocabulary)

    def compile(self, params: GuidedDecodingParams) -> Future[Grammar]:
        """Compile a grammar, or take it from the cache. The future raises ``PenstockError`` where it is wrong or not
        supported.

        Raises ``PenstockError``: ``unsupported`` where guided decoding is off, ``unavailable`` without a vocabulary.
        """
        if self._off:
            raise PenstockError(Code.UNSUPPORTED, "guided decoding is off (guided_decoding_backend)", params.field)
        if self._vocabulary is None:
            raise PenstockError(Code.UNAVAILABLE, "the engine has no vocabulary for guided decoding yet")
        if (grammar := self._cache.get(params)) is None or grammar.cancelled() or _failed_internally(grammar):
            self._evict()
            grammar = self._cache[params] = self._thread.submit(self._compile, params)
        self._cache.move_to_end(params)
        return grammar

    def _evict(self) -> None:
        """Remove the least recently used grammars until there is room for one more."""
        size = sum(map(_size, self._cache.values()))
        while len(self._cache) >= MAX_CACHED or size > MAX_CACHED_BYTES:
            size -= _size(self._cache.popitem(last=False)[1])

    def _compile(self, params: GuidedDecodingParams) -> Grammar:
        self._load_vocabulary()
        if self._added_tokens is None:
            assert self._vocabulary_failure
            raise PenstockError(Code.UNSUPPORTED, f"{params.field}: {self._vocabulary_failure.message}", params.field)
        try:
            check_no_added_tokens(params, self._added_tokens.tokens)
            return self._backend.result().compile(params)
        except RecursionError as error:
            raise invalid(params.field, "is nested too deeply") from error

    def _load_vocabulary(self) -> None:
        """Give the backend the vocabulary, once, even where that fails."""
        if self._added_tokens or self._vocabulary_failure:
            return
        assert self._vocabulary is not None
        started = time.monotonic()
        try:
            added_tokens = read_added_tokens(self._vocabulary)
            tokenizer = load_tokenizer(self._vocabulary, self._vocab_size)
            self._backend.result().set_vocabulary(tokenizer, added_tokens)
        except PenstockError as error:
            self._vocabulary_failure = error.failure
        else:
            self._added_tokens = added_tokens
            logger.info("guided decoding has read the vocabulary in %.2f seconds", time.monotonic() - started)


def _load(module: str, name: str) -> Backend:
    backend: Backend = getattr(importlib.import_module(module, __package__), name)()
    return backend


def _failed_internally(grammar: Future[Grammar]) -> bool:
    """Whether compilation failed for another reason than the grammar, so that it may succeed the next time."""
    error = grammar.exception() if grammar.done() else None
    return error is not None and (not isinstance(error, PenstockError) or error.failure.code is Code.INTERNAL)


def _size(grammar: Future[Grammar]) -> int:
    """Bytes of a compiled grammar; 0 for one that is not compiled yet, or failed."""
    return grammar.result().size if grammar.done() and not grammar.cancelled() and not grammar.exception() else 0
