"""Reading numbers from clients' texts."""

from __future__ import annotations


def read_decimal(text: str, maximum: int) -> int | None:
    """The number that a text of ASCII digits says; None for other texts, and for numbers above ``maximum``.

    ``int`` raises ``ValueError`` for more than 4,300 digits, and ``str.isdecimal`` accepts digits of other scripts.
    """
    digits = text.lstrip("0") or text[-1:]
    if not (text.isascii() and text.isdecimal()) or len(digits) > len(str(maximum)):
        return None
    number = int(digits)
    return number if number <= maximum else None
