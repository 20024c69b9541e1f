"""Validation of requests against the model, before they are queued."""

from __future__ import annotations

from penstock.core import Code, EngineRequest, PenstockError, PoolingParams
from penstock.core.errors import invalid
from penstock.models import ModelConfig

from ..step import MAX_VALUE_BYTES, ModelInfo
from .speech import check_audio

MAX_TIME = 2**31
"""Exclusive upper bound of ``ImageInput.time``."""


def check_request(request: EngineRequest, config: ModelConfig, info: ModelInfo) -> None:
    """Raise ``PenstockError`` for a request that this model cannot run."""
    if request.second_text and not (info.token_types > 1 and 0 < request.second_text < len(request.prompt)):
        raise invalid("second_text", "must be an index in the prompt, and requires a model with token types")
    if request.pooling:
        _check_pooling(request.pooling, info)
    elif not info.has_lm_head:
        message = "this checkpoint has no language model head: it only computes embeddings, and cannot generate"
        raise PenstockError(Code.UNSUPPORTED, message)
    if request.images and not info.has_vision:
        raise PenstockError(Code.UNSUPPORTED, "images: this model does not support image input", "images")
    if request.images:
        _check_images(request)
    if request.audio or config.speech:
        check_audio(request, config, info)
    _check_tokens(request, info.vocab_size)


def _check_images(request: EngineRequest) -> None:
    """Raise ``PenstockError`` (``invalid``) for images with inconsistent sizes or positions."""
    end = 0
    for image in request.images:
        if image.offset < end or image.length < 1 or image.end > len(request.prompt):
            raise invalid("images", "must be at increasing, non-overlapping positions in the prompt")
        if (image.continues and not image.offset == end > 0) or not 0 <= image.time < MAX_TIME:
            raise invalid("images", "that are frames of a video must be adjacent, with valid times")
        num_pictures = image.num_frames * image.tiles
        if image.num_frames < 1 or len(image.pixels) != 3 * num_pictures * image.height * image.width:
            raise invalid("images", "must have three bytes for each pixel")
        end = image.end


def _check_pooling(pooling: PoolingParams, info: ModelInfo) -> None:
    """Raise ``PenstockError`` for pooling that this model does not support."""
    if (pooling.dimensions or 0) > (limit := info.embedding_size):
        raise invalid("dimensions", f"must be at most {limit}, the dimensions of the model's embeddings", limit)
    if pooling.head and pooling.head not in info.heads:
        raise PenstockError(Code.UNSUPPORTED, f"this checkpoint has no {pooling.head} head", "head")
    if pooling.token_ids and not info.has_lm_head:
        raise PenstockError(Code.UNSUPPORTED, "this checkpoint has no language model head", "token_ids")
    if pooling.token_ids and not 0 <= min(pooling.token_ids) <= max(pooling.token_ids) < info.vocab_size:
        raise invalid("token_ids", f"token ids go from 0 to {info.vocab_size - 1}", info.vocab_size - 1)


def _check_tokens(request: EngineRequest, vocabulary: int) -> None:
    """Raise ``PenstockError`` (``invalid``) for token ids outside the vocabulary, bad words that exclude every token,
    and more context logits than fit into a message."""
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
            unknown = next(token for token in token_ids if not 0 <= token < vocabulary)
            raise invalid(field, f"token ids go from 0 to {vocabulary - 1}, and {unknown} is given", vocabulary - 1)
    if len(sampling.banned_token_ids) == vocabulary:
        raise invalid("bad_word_ids", "exclude every token of the vocabulary; allow at least one")
    size = len(request.prompt) * vocabulary * 4  # float32
    if sampling.return_context_logits and size > MAX_VALUE_BYTES:
        message = f"takes {size} bytes of logits; at most {MAX_VALUE_BYTES} can be returned"
        raise invalid("return_context_logits", message, MAX_VALUE_BYTES)
