"""Outputs: what a step sampled is appended to its sequence, and becomes a delta."""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.core import Failure, FinishReason, TokenDelta

from ..sequence.sequence import Sequence
from ..step import Draw


def append(sequence: Sequence, draw: Draw) -> TokenDelta:
    """Append the tokens of a draw, and those that its grammar forces after them. Returns the delta, whose ``finished``
    says whether the sequence ends; the caller ends it."""
    finished, stop_token, failure = None, None, None
    guide, token_ids = sequence.guide, draw.token_ids
    if draw.failure:
        return failed(sequence, (guide and guide.failure) or draw.failure)
    for i, token in enumerate(token_ids, 1):
        if guide and token in sequence.request.eos_token_ids:
            ended, token = token, guide.replace_eos(token)
            if token != ended:
                token_ids[i - 1] = token
                _replace(sequence)
            if draw.logprobs:  # which stay those of what was drawn
                draw.logprobs[i - 1][0] = msgspec.structs.replace(draw.logprobs[i - 1][0], token_id=token)
        sequence.tokens.append(token)
        if guide and (failure := guide.failure):
            finished = FinishReason.ERROR
        elif token in sequence.stops and sequence.generated > sequence.request.sampling.min_tokens:
            finished, stop_token = FinishReason.STOP, token
        elif guide and not guide.accept_token(token):
            finished, failure = FinishReason.ERROR, guide.failure
        elif guide and guide.is_terminated:
            finished = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.max_len or (guide and guide.token_limit_reached):
            finished = FinishReason.LENGTH
        elif guide and i == len(token_ids) and _may_jump(sequence) and (forced := guide.jump_forward_tokens()):
            token_ids += forced
            _replace(sequence)
        if finished:
            del token_ids[i:]
    for per_token in (draw.logprobs, draw.logits):
        if per_token:
            del per_token[len(token_ids) :]
    delta = TokenDelta(
        request_id=sequence.request.request_id,
        sequence=sequence.index,
        token_ids=token_ids,
        logprobs=draw.logprobs,
        prompt_logprobs=sequence.prompt_logprobs,
        context_logits=None if sequence.context_logits is None else b"".join(sequence.context_logits),
        generation_logits=None if draw.logits is None else b"".join(draw.logits),
        finished=finished,
        failure=failure,
        stop_token=stop_token,
        cached_tokens=sequence.cached or 0,
        queued=sequence.queued,
        perf=sequence.perf,
    )
    sequence.prompt_logprobs = sequence.context_logits = None
    sequence.queued = 0.0
    return delta


def _replace(sequence: Sequence) -> None:
    """Mark the next token that is appended as one that the workers did not sample, and have to be sent."""
    first = len(sequence.tokens)
    sequence.replaced = first if sequence.replaced is None else min(sequence.replaced, first)


def failed(sequence: Sequence, failure: Failure) -> TokenDelta:
    """The last delta of a sequence that ends with ``failure``."""
    request_id, finished = sequence.request.request_id, FinishReason.ERROR
    return TokenDelta(request_id=request_id, sequence=sequence.index, finished=finished, failure=failure)


def pool(sequence: Sequence, states: np.ndarray) -> TokenDelta | None:
    """Pool hidden states of a prompt, ``[tokens, hidden]`` float32. Returns the delta with the embedding when the whole
    prompt is computed, None before."""
    assert sequence.pooled is not None
    sequence.pooled.add(states)
    if sequence.num_computed < sequence.prompt_length:
        return None
    return TokenDelta(
        request_id=sequence.request.request_id,
        embedding=sequence.pooled.vector(),
        finished=FinishReason.STOP,
        cached_tokens=sequence.cached or 0,
        queued=sequence.queued,
    )


def _may_jump(sequence: Sequence) -> bool:
    """Whether forced tokens may be appended without being sampled: not where logprobs or logits of each are returned,
    or a stop string may end the sequence within them."""
    sampling = sequence.request.sampling
    returned = sampling.logprobs is not None or sampling.return_generation_logits
    return not sequence.num_pending and not returned and not sampling.stop
