"""The process that compiles grammars with llguidance: ``python -m penstock.engine.guided.llguidance_process``.

llguidance cannot serialize a compiled grammar. Therefore the engine compiles a grammar again after this process has
compiled it within the limits.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from penstock.core import Vocabulary

from .compile_process import Compile, CompileResult, memory_in_use, serve
from .errors import one_line
from .vocabulary import load_tokenizer

MAX_MEMORY = 2**28
"""Maximum bytes of memory to compile one grammar and its first state."""
MAX_LEXER_STATES = 50_000
"""Maximum number of states of a grammar's lexer. A state takes one or two kB, and is created when a sequence reaches
it."""


class VocabularyMessage(msgspec.Struct):
    """First message to the process: the arguments of ``load_tokenizer``."""

    vocabulary: Vocabulary
    vocab_size: int
    """Number of tokens of the model, padding included."""


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """Compile a grammar and its first state. Returns llguidance's matcher (``is_error()`` after a failure)."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _prepare(message: bytes) -> Compile:
    """Load the vocabulary of a ``VocabularyMessage``. Returns the compile function."""
    start = msgspec.json.decode(message, type=VocabularyMessage)
    tokenizer = load_tokenizer(start.vocabulary, start.vocab_size)

    def compile_request(request: bytes) -> CompileResult:
        before = memory_in_use()
        matcher = compile_grammar(tokenizer, json.loads(request))
        if matcher.is_error():
            message = one_line(matcher.get_error()).replace("NoExtensionBias", "no output matches it")
            return CompileResult(error=message)
        return CompileResult(size=max(0, memory_in_use() - before))

    return compile_request


if __name__ == "__main__":
    serve(_prepare, MAX_MEMORY)
