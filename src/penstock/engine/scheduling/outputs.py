"""Outputs: appends sampled tokens to their sequences, and creates the deltas for clients."""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.core import Failure, FinishReason, TokenDelta

from ..guided import Guide
from ..sequence.sequence import Sequence
from ..step import SampledTokens


def append_tokens(sequence: Sequence, sampled: SampledTokens) -> TokenDelta:
    """Append sampled tokens, and the tokens that the sequence's grammar forces after them (jump forward). Returns the
    delta. If the delta's ``finished`` is set, the caller has to end the sequence."""
    finished, stop_token, failure = None, None, None
    guide, token_ids = sequence.guide, sampled.token_ids
    if sampled.failure:
        return error_delta(sequence, (guide and guide.failure) or sampled.failure)
    for i, token in enumerate(token_ids, 1):
        if guide and token in sequence.request.eos_token_ids:
            eos, token = token, guide.replace_eos(token)
            if token != eos:
                token_ids[i - 1] = token
                _resend_next_token(sequence)
            if sampled.logprobs:  # the logprob remains that of the sampled token
                sampled.logprobs[i - 1][0] = msgspec.structs.replace(sampled.logprobs[i - 1][0], token_id=token)
        sequence.tokens.append(token)
        if guide and (failure := guide.failure):
            finished = FinishReason.ERROR
        elif token in sequence.stop_token_ids and sequence.num_output_tokens > sequence.request.sampling.min_tokens:
            finished, stop_token = FinishReason.STOP, token
        elif guide and not _accept(sequence, guide, token):
            finished, failure = FinishReason.ERROR, guide.failure
        elif guide and (replacement := guide.take_replacement()):
            _replace_last(sequence, sampled, replacement)
            finished = FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_len else None
            break
        elif guide and guide.is_terminated:
            finished = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.max_len or (guide and guide.token_limit_reached):
            finished = FinishReason.LENGTH
        elif guide and i == len(token_ids) and sequence.jumps_forward and (forced := guide.jump_forward_tokens()):
            token_ids += forced
            _resend_next_token(sequence)
        if finished:
            del token_ids[i:]
    for per_token in (sampled.logprobs, sampled.logits):
        if per_token:
            del per_token[len(token_ids) :]
    delta = TokenDelta(
        request_id=sequence.request.request_id,
        sequence=sequence.index,
        token_ids=token_ids,
        logprobs=sampled.logprobs,
        prompt_logprobs=sequence.prompt_logprobs,
        context_logits=None if sequence.context_logits is None else b"".join(sequence.context_logits),
        generation_logits=None if sampled.logits is None else b"".join(sampled.logits),
        finished=finished,
        failure=failure,
        stop_token=stop_token,
        cached_tokens=sequence.num_cached_tokens or 0,
        queued=sequence.queued,
        perf=sequence.perf,
        lowered_tools=sequence.lowered_tools,
    )
    sequence.prompt_logprobs = sequence.context_logits = None
    sequence.queued, sequence.lowered_tools = 0.0, ()
    return delta


def _accept(sequence: Sequence, guide: Guide, token: int) -> bool:
    """Advance the guide by a token. Returns False if the grammar does not allow the token."""
    was_idle = guide.is_idle
    if not guide.accept_token(token):
        return False
    if was_idle and not guide.is_idle:
        sequence.discard_pending()
    return True


def _replace_last(sequence: Sequence, sampled: SampledTokens, replacement: list[int]) -> None:
    """Replace the last sampled token by one or more tokens, within the sequence's maximum length. Their logprobs and
    logits are those of the sampled token."""
    sequence.tokens.pop()
    _resend_next_token(sequence)
    replacement = replacement[: sequence.max_len - len(sequence.tokens)]
    sequence.tokens += replacement
    sampled.token_ids[-1:] = replacement
    if sampled.logprobs:
        first, *top = sampled.logprobs.pop()
        sampled.logprobs.extend([msgspec.structs.replace(first, token_id=token), *top] for token in replacement)
    if sampled.logits:
        sampled.logits.extend([sampled.logits[-1]] * (len(replacement) - 1))


def _resend_next_token(sequence: Sequence) -> None:
    """Mark the next appended token to be sent to the workers, since they have not sampled this token themselves."""
    first = len(sequence.tokens)
    sequence.resend_from = first if sequence.resend_from is None else min(sequence.resend_from, first)


def error_delta(sequence: Sequence, failure: Failure) -> TokenDelta:
    """Delta that ends a sequence with ``failure``."""
    request_id, finished = sequence.request.request_id, FinishReason.ERROR
    return TokenDelta(request_id=request_id, sequence=sequence.index, finished=finished, failure=failure)


def pool_hidden_states(sequence: Sequence, states: np.ndarray) -> TokenDelta | None:
    """Pool hidden states of a prompt, ``[tokens, hidden]`` float32. Returns the delta with the embedding once the whole
    prompt is computed, before that None."""
    assert sequence.pooling_state is not None
    sequence.pooling_state.add(states)
    if sequence.num_computed < sequence.prompt_length:
        return None
    return TokenDelta(
        request_id=sequence.request.request_id,
        embedding=sequence.pooling_state.embedding(),
        finished=FinishReason.STOP,
        cached_tokens=sequence.num_cached_tokens or 0,
        queued=sequence.queued,
    )
