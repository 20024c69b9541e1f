"""Windows of a text whose perplexity is measured, as ``llama-perplexity`` makes them: each window begins anew, and its
second half is scored. So all systems score the same tokens."""

from __future__ import annotations

SIZE, FIRST = 512, 256
"""Tokens of a window, and the position from which on the next token is scored."""


def windows_of(ids: list[int], bos: int | None, count: int) -> list[list[int]]:
    """The first windows of a text.

    Args:
        ids: the text's tokens, without special ones.
        bos: the token with which the tokenizer begins a text; None if it adds none. It replaces the first token of
            each window.

    Raises ``ValueError`` where the text is too short.
    """
    ids = ids if bos is None else [bos, *ids]
    windows = [ids[i : i + SIZE] for i in range(0, len(ids) - SIZE + 1, SIZE)][:count]
    if len(windows) < count:
        raise ValueError(f"the text has {len(windows)} windows of {SIZE} tokens, {count} are asked for")
    return [[window[0] if bos is None else bos, *window[1:]] for window in windows]
