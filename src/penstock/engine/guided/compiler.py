"""The grammar compiler: compiles with llguidance, in other processes, and caches compiled grammars."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError, Vocabulary
from penstock.core.errors import invalid

from .backend import Grammar
from .bounded_guide import BoundedGrammar
from .compile_process import STACK_SIZE, CompileResult
from .errors import UnsupportedError, one_line
from .structural_tag import allows_free_text, json_parts
from .vocabulary import check_no_added_tokens

if TYPE_CHECKING:
    from .backend_llguidance import LLGuidance

logger = logging.getLogger(__name__)

MAX_CACHED_BYTES = 2**28
"""Memory of the cached grammars, bytes."""
MIN_CACHED_SIZE = 2**16
"""Bytes that a cached grammar counts at least, with what belongs to it."""
QUICK_TIME = 0.5
"""Seconds after which a grammar is one of the slow ones, which wait for each other and not the others for them."""
MAX_NAMED_PARTS = 64
"""Schemas of a refused structural tag that are compiled one by one, to name the one at fault."""
NUM_THREADS = 2
"""Grammars that are compiled at the same time, of the quick ones and of the slow ones."""


class GrammarCompiler:
    """Compiles grammars in processes that end with limits of time and memory, and caches them. Nothing is kept of one
    that failed, or of one whose request has ended.

    A grammar that is not compiled within ``QUICK_TIME`` begins anew among the slow ones, at the lowest priority.

    Args:
        backend: ``off`` to refuse all grammars; every other name of ``GuidedBackend`` is llguidance.
        vocab_size: number of tokens of the model.
    """

    def __init__(self, backend: str, vocab_size: int) -> None:
        if backend in ("xgrammar", "outlines", "lm-format-enforcer"):
            logger.info("guided_decoding_backend %s: llguidance is used, which follows the same constraints", backend)
        self._off = backend == "off"
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_failure: Failure | None = None
        """Why the backend cannot use the vocabulary."""
        self._vocabulary_lock = threading.Lock()
        self._backend: LLGuidance | None = None
        """None until the vocabulary is loaded."""
        self._preload: Future[None] | None = None
        self._quick = _executor("compile")
        self._slow = _executor("compile-slow", _lower_priority)
        self._cache = GrammarCache()
        self._compiling: dict[GuidedDecodingParams, Future[Grammar]] = {}

    def set_vocabulary(self, get_vocabulary: Callable[[], Vocabulary]) -> None:
        """Set the model's vocabulary; ``get_vocabulary`` is called if none is set yet."""
        if self._vocabulary is None:
            self._vocabulary = get_vocabulary()

    def preload_vocabulary(self) -> None:
        """Give the backend the vocabulary in the compiler's thread, before the first grammar needs it.

        To be called while the engine is idle: with 150,000 tokens, llguidance holds the GIL for one or two seconds.
        """
        if self._vocabulary and not self._off and self._preload is None:
            self._preload = self._quick.submit(self._load_vocabulary)

    def compile(self, params: GuidedDecodingParams) -> Future[Grammar]:
        """Compile a grammar, or take it from the cache. The future raises ``PenstockError`` if it is wrong, takes
        too much or is not supported; cancelling it ends the work.

        Raises ``PenstockError``: ``unsupported`` if guided decoding is off, ``unavailable`` without a vocabulary.
        """
        if self._off:
            raise PenstockError(Code.UNSUPPORTED, "guided decoding is off (guided_decoding_backend)", params.field)
        if self._vocabulary is None:
            raise PenstockError(Code.UNAVAILABLE, "the engine has no vocabulary for guided decoding yet")
        if (future := self._compiling.get(params)) and not future.done():
            return future
        future = Future()
        if grammar := self._cache.get(params):
            future.set_result(grammar)
            return future
        self._compiling[params] = future
        self._quick.submit(self._run, params, future, QUICK_TIME)
        return future

    def _run(self, params: GuidedDecodingParams, future: Future[Grammar], timeout: float | None) -> None:
        """Compile a grammar for a future, in a thread; among the slow ones if it takes longer than ``timeout``."""
        try:
            grammar = None if future.cancelled() else self._compile(params, future, timeout)
        except TimeoutError:
            self._slow.submit(self._run, params, future, None)
            return
        except Exception as error:
            self._forget(params, future)
            if future.set_running_or_notify_cancel():
                # Without the traceback, whose variables would stay as long as the future.
                future.set_exception(error.with_traceback(None))
            return
        if grammar:
            self._cache.add(params, grammar)
        self._forget(params, future)
        if future.set_running_or_notify_cancel():
            assert grammar
            future.set_result(grammar)

    def _forget(self, params: GuidedDecodingParams, future: Future[Grammar]) -> None:
        if self._compiling.get(params) is future:  # not another one since it was cancelled
            del self._compiling[params]

    def _compile(self, params: GuidedDecodingParams, future: Future[Grammar], timeout: float | None) -> Grammar:
        """Compile a constraint. An error in a structural tag names the text before the schema that is at fault.

        Raises ``TimeoutError`` if it takes longer than ``timeout`` seconds, None: as long as it may.
        """
        try:
            return self._compile_whole(params, future, timeout)
        except PenstockError as error:
            failure = error.failure
            for begin, schema in json_parts(params)[:MAX_NAMED_PARTS]:
                part = GuidedDecodingParams(json=schema, source_field=params.field)
                try:
                    self._compile_whole(part, future, timeout)
                except PenstockError as cause:
                    message = f"{cause.failure.message} (after {begin!r:.100})"
                    raise PenstockError(failure.code, message, params.field) from error
            raise

    def _compile_whole(self, params: GuidedDecodingParams, future: Future[Grammar], timeout: float | None) -> Grammar:
        field = params.field
        self._load_vocabulary()
        if (backend := self._backend) is None:
            assert self._vocabulary_failure
            raise PenstockError(Code.UNSUPPORTED, f"{field}: {self._vocabulary_failure.message}", field)
        try:
            check_no_added_tokens(params, backend.added_tokens.tokens)
            request = backend.request(params)
        except UnsupportedError as error:
            raise _unsupported(field, str(error)) from error
        except RecursionError as error:
            raise invalid(field, "is nested too deeply") from error
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise invalid(field, f"is wrong: {one_line(str(error))}") from error
        result = _compile_in_process(backend, request, future, timeout)
        if result.error:
            raise _unsupported(field, result.error)
        grammar = backend.grammar(request, result.size)
        if not params.is_json:
            return grammar
        return BoundedGrammar(grammar, backend.token_classes, bounds_strings=not allows_free_text(params))

    def _load_vocabulary(self) -> None:
        """Give the backend the vocabulary, once, even if that fails."""
        with self._vocabulary_lock:
            if self._backend or self._vocabulary_failure:
                return
            assert self._vocabulary is not None
            from .backend_llguidance import LLGuidance  # not imported before a grammar may come

            started = time.monotonic()
            try:
                self._backend = LLGuidance(self._vocabulary, self._vocab_size)
            except PenstockError as error:
                self._vocabulary_failure = error.failure
            else:
                logger.info("guided decoding has read the vocabulary in %.2f seconds", time.monotonic() - started)


def _compile_in_process(
    backend: LLGuidance, request: bytes, future: Future[Grammar], timeout: float | None
) -> CompileResult:
    compilation = backend.process.compile(request)
    try:
        future.add_done_callback(lambda _: compilation.cancel())
        if timeout is None:
            compilation.lower_priority()
        return compilation.wait(timeout)
    finally:
        compilation.close()


def _unsupported(field: str, message: str) -> PenstockError:
    return PenstockError(Code.UNSUPPORTED, f"{field}: not supported: {message}", field)


class GrammarCache:
    """Compiled grammars, the least recently used of which go once they take too much memory together."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[GuidedDecodingParams, Grammar] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, params: GuidedDecodingParams) -> Grammar | None:
        with self._lock:
            if params in self._grammars:
                self._grammars.move_to_end(params)
            return self._grammars.get(params)

    def add(self, params: GuidedDecodingParams, grammar: Grammar) -> None:
        with self._lock:
            if params in self._grammars:
                return
            self._grammars[params] = grammar
            self._size += _size(grammar)
            while self._size > MAX_CACHED_BYTES:
                self._size -= _size(self._grammars.popitem(last=False)[1])


def _size(grammar: Grammar) -> int:
    return max(grammar.size, MIN_CACHED_SIZE)


def _executor(name: str, initializer: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Threads with a stack for schemas as deep as they are allowed to be."""
    default_stack_size = threading.stack_size(STACK_SIZE)
    try:
        executor = ThreadPoolExecutor(NUM_THREADS, name, initializer)
        started = threading.Barrier(NUM_THREADS)
        for _ in range(NUM_THREADS):
            executor.submit(started.wait)
    finally:
        threading.stack_size(default_stack_size)
    return executor


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
