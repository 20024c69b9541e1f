"""Validation of requests against the model, before they are queued."""

from __future__ import annotations

from collections.abc import Collection

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
        message = f"is {request.second_text}, must be below the prompt's {len(request.prompt)} tokens"
        raise invalid("second_text", message if info.token_types > 1 else "must be 0 for a model without token types")
    if request.pooling:
        _check_pooling(request.pooling, info)
    elif not info.has_lm_head:
        message = (
            "this checkpoint has no language model head and cannot generate text; use an endpoint for embeddings, "
            "scores or classification"
        )
        raise PenstockError(Code.UNSUPPORTED, message)
    if request.images and not info.has_vision:
        raise PenstockError(Code.UNSUPPORTED, "images: this model does not support image input; send text", "images")
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
            message = f"image at tokens {image.offset} to {image.end - 1} must have at least one token, begin at token"
            raise invalid("images", f"{message} {end} or later, and end within the {len(request.prompt)} prompt tokens")
        if (image.continues and not image.offset == end > 0) or not 0 <= image.time < MAX_TIME:
            message = f"frames at token {image.offset} that continue a video must begin at token {end}, where the"
            message += f" previous frames end; their time, {image.time}, must be from 0 to {MAX_TIME - 1}"
            raise invalid("images", message)
        size = 3 * image.num_frames * image.tiles * image.height * image.width
        if image.num_frames < 1 or len(image.pixels) != size:
            message = f"image with {image.num_frames} frames must have {size} bytes (3 per pixel)"
            raise invalid("images", f"{message}, has {len(image.pixels)}")
        end = image.end


def _check_pooling(pooling: PoolingParams, info: ModelInfo) -> None:
    """Raise ``PenstockError`` for pooling that this model does not support."""
    if (pooling.dimensions or 0) > (limit := info.embedding_size):
        message = f"must be at most {limit}, the dimensions of the model's embeddings; is {pooling.dimensions}"
        raise invalid("dimensions", message, limit)
    if pooling.head and pooling.head not in info.heads:
        message = f"this checkpoint has no {pooling.head} head; its heads: {', '.join(info.heads) or 'none'}"
        raise PenstockError(Code.UNSUPPORTED, message, "head")
    if pooling.token_ids and not info.has_lm_head:
        message = "token_ids: this checkpoint has no language model head to score tokens; remove token_ids"
        raise PenstockError(Code.UNSUPPORTED, message, "token_ids")
    _check_range("token_ids", pooling.token_ids or (), info.vocab_size)


def _check_tokens(request: EngineRequest, vocabulary: int) -> None:
    """Raise ``PenstockError`` (``invalid``) for token ids outside the vocabulary, bad words that exclude every token,
    and more context logits than fit into a message."""
    sampling = request.sampling
    given: dict[str, Collection[int]] = {
        "prompt": request.prompt,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_word_ids": [token for word in sampling.bad_word_ids for token in word],
        "eos_token_ids": [token for token in request.eos_token_ids if token < vocabulary],  # larger ids never occur
        "reasoning": (span.begin, span.end, *span.answer, *span.opening) if (span := request.reasoning) else (),
    }
    for field, token_ids in given.items():
        _check_range(field, token_ids, vocabulary)
    if len(sampling.banned_token_ids) == vocabulary:
        raise invalid("bad_word_ids", f"exclude all {vocabulary} tokens of the vocabulary; allow at least one")
    size = len(request.prompt) * vocabulary * 4  # a logit is a float32, 4 bytes
    if sampling.return_context_logits and size > MAX_VALUE_BYTES:
        message = f"takes {size} bytes of logits; at most {MAX_VALUE_BYTES} can be returned; shorten the prompt"
        raise invalid("return_context_logits", message, MAX_VALUE_BYTES)


def _check_range(field: str, token_ids: Collection[int], vocabulary: int) -> None:
    """Raise ``PenstockError`` (``invalid``) for a token id outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        unknown = next(token for token in token_ids if not 0 <= token < vocabulary)
        raise invalid(field, f"token ids go from 0 to {vocabulary - 1}, and {unknown} is given", vocabulary - 1)
