"""Speed of an answer. ``serve/web/static/chat/speed.js`` is the same function for the web page."""

from __future__ import annotations

MIN_SPAN = 1.0
"""Shortest time in seconds over which the rate between tokens is measured: tokens arrive in groups."""


def tokens_per_second(tokens: int, started: float, first: float | None, last: float | None) -> float | None:
    """Tokens per second; None if there is nothing to measure.

    Long answers: rate from the first token to the last one. Short answers, whose tokens arrive in a few groups: tokens
    by the time since the request, which includes the prompt.

    Args:
        tokens: number of generated tokens.
        started: time of the request in seconds.
        first: time of the first token; None if there was none.
        last: time of the last token.
    """
    if not tokens or first is None or last is None:
        return None
    if tokens > 1 and last - first >= MIN_SPAN:
        return (tokens - 1) / (last - first)
    return tokens / (last - started) if last > started else None
