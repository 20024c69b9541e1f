"""Sampling parameters of a request."""

from __future__ import annotations

from typing import Any

from penstock.core import SamplingParams
from penstock.core.errors import invalid

from .request import ChatRequest, GenerationRequest
from .structured_outputs import guided_decoding_of

SHARED_FIELDS = (
    "n best_of use_beam_search length_penalty early_stopping temperature top_p top_k min_p presence_penalty "
    "frequency_penalty repetition_penalty seed logit_bias allowed_token_ids bad_words min_tokens stop "
    "stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens prompt_logprobs "
    "temp_scaled_logprobs top_p_normalized_logprobs"
).split()
"""Fields that have the same name in ``SamplingParams``."""


def sampling_of(request: GenerationRequest, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        defaults: for fields that the request does not give.
        overrides: values that chats and completions name differently.
    """
    given = {name: value for name in SHARED_FIELDS if (value := getattr(request, name)) is not None}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in given:
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if request.bad_words_token_ids is not None:
        bad_words = request.bad_words_token_ids
        given["bad_word_ids"] = tuple((word,) if isinstance(word, int) else tuple(word) for word in bad_words)
    if (form := guided_decoding_of(request)) is not None:
        given["guided_decoding"] = form
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "requires stream")
    if given.get("top_p") == 0:
        given |= {"top_p": 1.0, "top_k": 1}
    if request.use_beam_search:  # the defaults of generation_config.json are for sampling
        defaults = defaults.replace(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return defaults.replace(**given, **overrides)


def chat_sampling(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a chat. Raises ``PenstockError`` (``invalid``) for contradictions."""
    both = {value for value in (request.max_tokens, request.max_completion_tokens) if value is not None}
    if len(both) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens; give one of them")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "requires logprobs")
    budgets = {value for value in (request.reasoning_max_tokens, request.thinking_token_budget) if value is not None}
    if len(budgets) > 1:
        raise invalid("thinking_token_budget", "differs from reasoning_max_tokens; give one of them")
    budget = budgets.pop() if budgets else -1
    overrides = {
        "max_tokens": both.pop() if both else None,
        "reasoning_max_tokens": budget if budget >= 0 else None,
        "response_max_tokens": request.response_max_tokens,
    }
    return sampling_of(
        request, defaults, **overrides, logprobs=(request.top_logprobs or 0) if request.logprobs else None
    )
