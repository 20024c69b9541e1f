"""Requests that a model cannot run, refused before they are queued."""

from __future__ import annotations

from penstock.core import Code, EngineRequest, PenstockError, PoolingParams
from penstock.core.errors import invalid
from penstock.models import ModelConfig

from ..step import MAX_VALUE_BYTES, ModelInfo
from .speech import check_audio

MAX_TIME = 2**31
"""Of ``ImageInput.time``."""


def check_request(request: EngineRequest, config: ModelConfig, info: ModelInfo) -> None:
    """Raise ``PenstockError`` for a request that this model cannot run."""
    if request.second_text and not (info.token_types > 1 and 0 < request.second_text < len(request.prompt)):
        raise invalid("second_text", "must be an index of the prompt, of a model with token types")
    if request.pooling:
        _check_pooling(request.pooling, info)
    elif not info.has_lm_head:
        message = "this checkpoint has no language model head: it makes embeddings, and cannot generate"
        raise PenstockError(Code.UNSUPPORTED, message)
    if request.images and not info.has_vision:
        raise PenstockError(Code.UNSUPPORTED, "images: this model sees none, only text", "images")
    if request.images:
        _check_images(request)
    if request.audio or config.speech:
        check_audio(request, config, info)
    _check_tokens(request, info.vocab_size)


def _check_images(request: EngineRequest) -> None:
    """Raise ``PenstockError`` (``invalid``) for images whose sizes or places do not fit."""
    end = 0
    for image in request.images:
        if image.offset < end or image.length < 1 or image.end > len(request.prompt):
            raise invalid("images", "must have places in the prompt, one behind the other")
        if (image.continues and not image.offset == end > 0) or not 0 <= image.time < MAX_TIME:
            raise invalid("images", "must have their places in a video")
        pictures = image.num_frames * image.tiles
        if image.num_frames < 1 or len(image.pixels) != 3 * pictures * image.height * image.width:
            raise invalid("images", "must have a byte for each channel of a pixel")
        end = image.end


def _check_pooling(pooling: PoolingParams, info: ModelInfo) -> None:
    """Raise ``PenstockError`` for pooling that this model has not."""
    if (pooling.dimensions or 0) > info.embedding_size:
        raise invalid("dimensions", f"must be at most the model's {info.embedding_size}", info.embedding_size)
    if pooling.head and pooling.head not in info.heads:
        raise PenstockError(Code.UNSUPPORTED, f"this checkpoint has no {pooling.head} behind its hidden states", "head")
    if pooling.token_ids and not info.has_lm_head:
        raise PenstockError(Code.UNSUPPORTED, "this checkpoint has no language model head", "token_ids")
    if pooling.token_ids and not 0 <= min(pooling.token_ids) <= max(pooling.token_ids) < info.vocab_size:
        raise invalid("token_ids", f"token ids go from 0 to {info.vocab_size - 1}", info.vocab_size - 1)


def _check_tokens(request: EngineRequest, vocabulary: int) -> None:
    """Raise ``PenstockError`` (``invalid``) for token ids outside the vocabulary, for bad words that exclude all of it,
    and for more context logits than a message holds."""
    sampling = request.sampling
    given = {
        "prompt": request.prompt,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_word_ids": [token for word in sampling.bad_word_ids for token in word],
        "eos_token_ids": [token for token in request.eos_token_ids if token < vocabulary],  # others are never sampled
        "reasoning": (span.begin, span.end, *span.answer, *span.opening) if (span := request.reasoning) else (),
    }
    for field, token_ids in given.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
            raise invalid(field, f"token ids go from 0 to {vocabulary - 1}, and {wrong} is given", vocabulary - 1)
    if len(sampling.banned_token_ids) == vocabulary:
        raise invalid("bad_word_ids", "exclude every token of the vocabulary; allow at least one")
    size = len(request.prompt) * vocabulary * 4  # float32
    if sampling.return_context_logits and size > MAX_VALUE_BYTES:
        message = f"takes {size} bytes of logits; at most {MAX_VALUE_BYTES} can be returned"
        raise invalid("return_context_logits", message, MAX_VALUE_BYTES)
