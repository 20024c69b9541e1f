"""Windows of a text for perplexity, as in ``llama-perplexity``: each window is a separate sequence, and its second half
is scored, so that all systems score the same tokens."""

from __future__ import annotations

SIZE, FIRST = 512, 256
"""Number of tokens of a window, and the first position whose next token is scored."""


def windows_of(ids: list[int], bos: int | None, count: int) -> list[list[int]]:
    """First ``count`` windows of a text.

    Args:
        ids: token ids of the text, without special tokens.
        bos: BOS token, which replaces the first token of each window; None if the tokenizer adds none.

    Raises ``ValueError`` if the text is too short.
    """
    ids = ids if bos is None else [bos, *ids]
    windows = [ids[i : i + SIZE] for i in range(0, len(ids) - SIZE + 1, SIZE)][:count]
    if len(windows) < count:
        raise ValueError(f"the text has {len(windows)} windows of {SIZE} tokens, fewer than {count}")
    return [[window[0] if bos is None else bos, *window[1:]] for window in windows]
