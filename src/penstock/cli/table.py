"""Tables of commands: aligned columns of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wcwidth import wcswidth, wcwidth


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Format rows as lines, after a line of titles. Chinese characters take two columns of the terminal.

    Args:
        right: titles of the columns that are aligned right.
    """
    columns = zip(titles, *(map(printable, row) for row in rows), strict=True)
    aligned = [_aligned(cells, title in right) for title, cells in zip(titles, columns, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def printable(text: str) -> str:
    """The text with a space instead of each control character, whose width is unknown."""
    return "".join(" " if wcwidth(character) < 0 else character for character in text)


def columns_of(text: str) -> int:
    """Number of columns that a text without control characters takes in the terminal: Chinese characters take two."""
    return wcswidth(text)


def cut(text: str, columns: int) -> str:
    """The beginning of a text that fits into ``columns`` columns of the terminal."""
    text = printable(text)
    while columns_of(text) > columns:
        text = text[:-1]
    return text


def _aligned(cells: Sequence[str], right: bool) -> list[str]:
    widths = list(map(columns_of, cells))
    padded = [(" " * (max(widths) - width), cell) for width, cell in zip(widths, cells, strict=True)]
    return [space + cell if right else cell + space for space, cell in padded]
