"""Parsing of numbers in untrusted text."""

from __future__ import annotations


def read_decimal(text: str, maximum: int) -> int | None:
    """Parse ASCII digits; None for any other text, and for numbers above ``maximum``.

    Unlike ``int``, it rejects digits of other scripts, and does not raise ``ValueError`` for more than 4,300 digits.
    """
    digits = text.lstrip("0") or text[-1:]
    if not (text.isascii() and text.isdecimal()) or len(digits) > len(str(maximum)):
        return None
    number = int(digits)
    return number if number <= maximum else None
