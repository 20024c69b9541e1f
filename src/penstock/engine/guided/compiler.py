"""The grammar compiler: compiles grammars with llguidance and caches them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError, ToolCallParams, Vocabulary
from penstock.core.errors import invalid

from .backend import Grammar
from .bounded_guide import BoundedGrammar
from .compile_process import STACK_SIZE, CompileResult
from .errors import UnsupportedError, one_line
from .structural_tag import allows_free_text, fallbacks, json_parts, resolve_fallbacks
from .tool_call_guide import ToolCallGrammar
from .vocabulary import check_no_added_tokens

if TYPE_CHECKING:
    from .backend_llguidance import LLGuidance

logger = logging.getLogger(__name__)

Constraint = GuidedDecodingParams | ToolCallParams

MAX_CACHED_BYTES = 2**28
"""Maximum bytes of cached grammars."""
MIN_CACHED_SIZE = 2**16
"""Minimum size of a cached grammar in the sum of sizes, to account for the cache key and bookkeeping; bytes."""
QUICK_TIME = 0.5
"""Seconds after which a compilation moves to the threads for slow grammars, where it does not delay quick grammars."""
MAX_NAMED_PARTS = 64
"""Maximum number of schemas of a refused structural tag that are compiled one by one, to find the invalid schema."""
NUM_THREADS = 2
"""Number of threads for quick grammars, and number of threads for slow grammars."""


class GrammarCompiler:
    """Compiles grammars in processes with limits of time and memory, and caches the compiled grammars.

    A grammar not compiled within ``QUICK_TIME`` is compiled again by the threads for slow grammars, at lowest priority.

    Args:
        backend: ``off`` to refuse all grammars; every other ``GuidedBackend`` selects llguidance.
        vocab_size: number of tokens of the model.
    """

    def __init__(self, backend: str, vocab_size: int) -> None:
        if backend in ("xgrammar", "outlines", "lm-format-enforcer"):
            logger.info("guided_decoding_backend %s: llguidance is used instead, with the same constraints", backend)
        self._off = backend == "off"
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_failure: Failure | None = None
        """Error of the backend for this vocabulary; None without an error."""
        self._vocabulary_lock = threading.Lock()
        self._backend: LLGuidance | None = None
        """llguidance with the vocabulary; None until the vocabulary is loaded."""
        self._preload: Future[None] | None = None
        """Result of ``preload_vocabulary``; None if it was not called."""
        self._quick = _executor("compile")
        self._slow = _executor("compile-slow", _lower_priority)
        self._cache = GrammarCache()
        self._compiling: dict[Constraint, Future[Grammar]] = {}
        """Futures of grammars that are being compiled."""

    def set_vocabulary(self, get_vocabulary: Callable[[], Vocabulary]) -> None:
        """Set the model's vocabulary, unless it is set already."""
        if self._vocabulary is None:
            self._vocabulary = get_vocabulary()

    def preload_vocabulary(self) -> None:
        """Load the vocabulary in a thread of the compiler, before the first grammar needs it.

        Call this while the engine is idle: with 150,000 tokens, llguidance holds the GIL for one or two seconds.
        """
        if self._vocabulary and not self._off and self._preload is None:
            self._preload = self._quick.submit(self._load_vocabulary)

    def compile(self, params: Constraint) -> Future[Grammar]:
        """Compile a grammar, or get it from the cache. The returned future raises ``PenstockError`` if the grammar is
        invalid, not supported, or exceeds the limits. Cancelling the future ends the compilation. For tool calls, the
        future does not raise unless they are ``required``: calls without a grammar are not constrained.

        Raises ``PenstockError``: ``unsupported`` if guided decoding is off, ``unavailable`` without a vocabulary.
        """
        if self._off and isinstance(params, ToolCallParams) and not params.required:
            unconstrained: Future[Grammar] = Future()
            unconstrained.set_result(ToolCallGrammar(params, None, None))
            return unconstrained
        if self._off:
            message = "guided decoding is off (guided_decoding_backend); start the engine with auto to use it"
            raise PenstockError(Code.UNSUPPORTED, message, _field(params))
        if self._vocabulary is None:
            raise PenstockError(Code.UNAVAILABLE, "the engine has no vocabulary for guided decoding yet; retry later")
        if (future := self._compiling.get(params)) and not future.done():
            return future
        future = Future()
        if grammar := self._cache.get(params):
            future.set_result(grammar)
            return future
        self._compiling[params] = future
        self._quick.submit(self._run, params, future, QUICK_TIME)
        return future

    def _run(self, params: Constraint, future: Future[Grammar], timeout: float | None) -> None:
        """Compile a grammar in a thread and complete ``future``. After ``timeout`` seconds, the compilation is moved to
        the threads for slow grammars."""
        try:
            grammar = None if future.cancelled() else self._compile(params, future, timeout)
        except TimeoutError:
            self._slow.submit(self._run, params, future, None)
            return
        except Exception as error:
            self._forget(params, future)
            if future.set_running_or_notify_cancel():
                # The traceback would keep the variables of its frames alive as long as the future.
                future.set_exception(error.with_traceback(None))
            return
        if grammar:
            self._cache.add(params, grammar)
        self._forget(params, future)
        if future.set_running_or_notify_cancel():
            assert grammar
            future.set_result(grammar)

    def _forget(self, params: Constraint, future: Future[Grammar]) -> None:
        """Remove a completed or cancelled future, unless a new future has replaced it."""
        if self._compiling.get(params) is future:
            del self._compiling[params]

    def _compile(self, params: Constraint, future: Future[Grammar], timeout: float | None) -> Grammar:
        """Compile a constraint.

        Raises ``TimeoutError`` after ``timeout`` seconds (None: only the limits of the compile process apply).
        """
        if isinstance(params, GuidedDecodingParams):
            return self._compile_tools(params, future, timeout)
        try:
            grammar = self._compile_tools(params.constraint, future, timeout)
        except PenstockError as error:
            if params.required:
                raise
            logger.info("tool calls are not constrained: %s", error.failure.message)
            return ToolCallGrammar(params, None, None)
        assert self._backend
        self._backend.texts.markers(params.markers)  # computed here, as it takes long with a large vocabulary
        return ToolCallGrammar(params, grammar, self._backend.texts)

    def _compile_tools(self, params: GuidedDecodingParams, future: Future[Grammar], timeout: float | None) -> Grammar:
        """Compile a constraint, with the formats of its structural tag that cannot be compiled replaced (fallbacks)."""
        tag = json.loads(params.structural_tag) if params.has_tools else {}
        parts = {part["name"]: part["content"] for part in fallbacks(tag)}
        if not parts:
            return self._compile_named(params, future, timeout)

        def resolved(replaced: Collection[str]) -> GuidedDecodingParams:
            return msgspec.structs.replace(params, structural_tag=resolve_fallbacks(tag, replaced))

        failures: dict[str, str] = {}
        for _ in range(2):
            try:
                return self._compile_whole(resolved(()), future, timeout)
            except PenstockError as error:
                failure = error.failure
            failures = failures or self._failing_parts(params, parts, future, timeout)
            if failures:
                break  # otherwise the process may have been killed, or the whole exceeds its limits
        for name, message in failures.items():
            logger.info("the arguments of the tool %s are not constrained: %s", name, message)
        if not failures:
            logger.warning("the arguments of %d tools are not constrained: %s", len(parts), failure.message)
        failed = list(failures or parts)
        grammar = self._compile_named(resolved(failed), future, timeout)
        grammar.lowered_tools = tuple(failed)
        return grammar

    def _failing_parts(
        self,
        params: GuidedDecodingParams,
        parts: Mapping[str, Any],
        future: Future[Grammar],
        timeout: float | None,
    ) -> dict[str, str]:
        """Error messages of the formats in ``parts`` that cannot be compiled, by name."""
        failures = {}
        for name, part in parts.items():
            try:
                alone = msgspec.structs.replace(params, structural_tag={"format": part})
                self._compile_whole(alone, future, timeout)
            except PenstockError as error:
                failures[name] = error.failure.message
        return failures

    def _compile_named(self, params: GuidedDecodingParams, future: Future[Grammar], timeout: float | None) -> Grammar:
        """Compile a constraint. If a schema in a structural tag is invalid, the error quotes the text before it."""
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
        """``_compile_named``, without finding the invalid schema of a structural tag."""
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
            raise invalid(field, "is nested too deeply; reduce its nesting") from error
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise invalid(field, f"is invalid: {one_line(str(error))}") from error
        result = _compile_in_process(backend, request, future, timeout)
        if result.error:
            raise _unsupported(field, result.error)
        grammar = backend.grammar(request, result.size)
        if not params.is_json:
            return grammar
        return BoundedGrammar(grammar, backend.token_classes, bounds_strings=not allows_free_text(params))

    def _load_vocabulary(self) -> None:
        """Create the backend with the vocabulary. Only the first call has an effect, even if it fails."""
        with self._vocabulary_lock:
            if self._backend or self._vocabulary_failure:
                return
            assert self._vocabulary is not None
            from .backend_llguidance import LLGuidance  # imported only if guided decoding may be used

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
    """Compile an encoded ``request`` in a separate process. Cancelling ``future`` ends the compilation."""
    compilation = backend.process.compile(request)
    try:
        future.add_done_callback(lambda _: compilation.cancel())
        if timeout is None:
            compilation.lower_priority()
        return compilation.wait(timeout)
    finally:
        compilation.close()


def _unsupported(field: str, message: str) -> PenstockError:
    """Error for a constraint that llguidance does not support; ``message`` names the unsupported part."""
    return PenstockError(Code.UNSUPPORTED, f"{field}: not supported: {message}", field)


class GrammarCache:
    """LRU cache of compiled grammars, limited to ``MAX_CACHED_BYTES``."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, params: Constraint) -> Grammar | None:
        """Cached grammar of a constraint; None if it is not cached."""
        with self._lock:
            if params in self._grammars:
                self._grammars.move_to_end(params)
            return self._grammars.get(params)

    def add(self, params: Constraint, grammar: Grammar) -> None:
        """Cache a grammar, and evict the least recently used ones beyond the limit."""
        with self._lock:
            if params in self._grammars:
                return
            self._grammars[params] = grammar
            self._size += _size(params, grammar)
            while self._size > MAX_CACHED_BYTES:
                self._size -= _size(*self._grammars.popitem(last=False))


def _field(params: Constraint) -> str:
    """Name of the request's field that holds a constraint."""
    return (params.constraint if isinstance(params, ToolCallParams) else params).field


def _size(params: Constraint, grammar: Grammar) -> int:
    """Bytes of a cached grammar and its key."""
    key = params.constraint if isinstance(params, ToolCallParams) else params
    return max(grammar.size, MIN_CACHED_SIZE) + key.characters


def _executor(name: str, initializer: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Create ``NUM_THREADS`` threads with stacks that are large enough for the deepest allowed schema."""
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
    """Give this thread the lowest scheduling priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
