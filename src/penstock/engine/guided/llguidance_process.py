"""The process that compiles grammars with llguidance: ``python -m penstock.engine.guided.llguidance_process``.

llguidance cannot serialize a compiled grammar, so the engine compiles it again once it has passed the limits here.
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
"""Maximum bytes to compile one grammar, its first state included."""
MAX_LEXER_STATES = 50_000
"""Maximum number of states of a grammar's lexer, of one or two kB each. They are created as sequences reach them."""


class VocabularyMessage(msgspec.Struct):
    """Arguments of ``load_tokenizer``."""

    vocabulary: Vocabulary
    vocab_size: int


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """Compile a grammar and its first state. Returns llguidance's matcher, which may have an error."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _prepare(message: bytes) -> Compile:
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
