"""Excludes next tokens that ``DecodingRules`` do not allow in a transcript, like OpenAI's Whisper implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.audio import DecodingRules

from .row import Position

EXCLUDED = float("-inf")
"""Logit of an excluded token."""


def apply_rules(logits: Tensor, position: Position, rules: DecodingRules) -> None:
    """Exclude tokens that the rules do not allow next.

    Args:
        logits: logits at the position, ``[vocabulary]`` float32, overwritten.
    """
    number = position.num_output_tokens
    if number < len(rules.forced):
        allowed = torch.tensor(rules.forced[number], device=logits.device)
        chosen = allowed[logits[allowed].argmax()]
        logits.fill_(EXCLUDED)
        logits[chosen] = 0.0
        return
    first = number == len(rules.forced)
    suppressed = rules.suppressed + (rules.suppressed_first if first else ())
    logits[list(suppressed)] = EXCLUDED
    if rules.timestamp_begin:
        begin = position.row.prompt_length + len(rules.forced)
        tokens = position.row.tokens[begin : position.length].tolist()
        _apply_timestamp_rules(logits, tokens, rules)


def _apply_timestamp_rules(logits: Tensor, tokens: list[int], rules: DecodingRules) -> None:
    """Exclude tokens that violate the rules for timestamps. Timestamps form pairs, at the end of a segment and the
    start of the next one, and do not decrease. The transcript begins with a timestamp. If all timestamps together are
    more likely than every other token, the next token must be a timestamp."""
    begin = rules.timestamp_begin
    logits[begin - 1] = EXCLUDED  # the token before the first timestamp is <|notimestamps|>
    if not tokens:
        logits[:begin] = EXCLUDED
        logits[begin + rules.max_initial_timestamp + 1 :] = EXCLUDED
    elif tokens[-1] >= begin:
        if len(tokens) < 2 or tokens[-2] >= begin:  # the last token completes a pair, or is the first of the transcript
            logits[begin:] = EXCLUDED
        else:
            logits[: rules.eos] = EXCLUDED
    if times := [token for token in tokens if token >= begin]:
        ends_segment = tokens[-1] >= begin and len(tokens) > 1 and tokens[-2] < begin
        logits[begin : times[-1] + (0 if ends_segment else 1)] = EXCLUDED
    logprobs = logits.log_softmax(-1)
    if logprobs[begin:].logsumexp(-1) > logprobs[:begin].max():
        logits[:begin] = EXCLUDED
