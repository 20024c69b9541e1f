"""What the model's tokens spell, read once and the same for either backend."""

from __future__ import annotations

from typing import Any

from penstock.core import Code, PenstockError, Vocabulary

from .guide import first_line


def read_tokens(known: Vocabulary, size: int, field: str) -> Any:
    """llguidance's ``LLTokenizer``, which knows each token's bytes, and which tokens are marks that no text spells.

    Args:
        size: of the model's vocabulary.
        field: of the request that is told where the tokenizer cannot be read.

    Raises ``PenstockError`` (``unsupported``) where it cannot.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(known.tokenizer, n_vocab=size, eos_token=known.eos)
    except ValueError as error:
        words = f"{field}: not with this model's tokenizer: {first_line(str(error))}"
        raise PenstockError(Code.UNSUPPORTED, words, field) from error
