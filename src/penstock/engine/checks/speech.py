"""Validation of options and requests for speech-to-text models."""

from __future__ import annotations

import logging

import msgspec

from penstock.config.options import EngineOptions
from penstock.core import Code, EngineRequest, PenstockError
from penstock.core.audio import Alignment
from penstock.core.errors import invalid
from penstock.models import ModelConfig

from ..step import ModelInfo

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 16
"""Maximum number of running sequences, as each needs memory for the cross-attention KV of an audio window."""


def speech_options(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """Return the options adapted to a speech-to-text model.

    Raises ``PenstockError`` (``unsupported``), with the option as its field, for options that such models do not
    support.
    """
    for name, is_given in {
        "tensor_parallel_size": options.tensor_parallel_size > 1,
        "pipeline_parallel_size": options.pipeline_parallel_size > 1 or bool(options.pipeline_parallel_layers),
        "role": options.role != "mixed",
        "enable_lora": options.enable_lora,
        "lora_modules": bool(options.lora_modules),
        "speculative_config": bool(options.speculative_config),
        "quantization": options.quantization != "none" or config.quantization != "none",
        "kv_cache_dtype": options.kv_cache_dtype != "auto",
        "kv_offloading_size": options.host_tier_bytes > 0,
        "load_format": options.load_format == "dummy",
    }.items():
        if is_given:
            message = f"{name}: {getattr(options, name)} is not supported for speech-to-text models; remove this option"
            raise PenstockError(Code.UNSUPPORTED, message, name)
    if config.quantization_config:
        message = "model: quantized speech-to-text checkpoints are not supported; use an unquantized checkpoint"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if options.max_num_seqs > MAX_SEQUENCES:
        message = "max_num_seqs is lowered from %d to %d, the maximum for speech-to-text models"
        logger.info(message, options.max_num_seqs, MAX_SEQUENCES)
        options = msgspec.structs.replace(options, max_num_seqs=MAX_SEQUENCES)
    # Prefix caching is off because equal prompts have different audio; warm-up, because its requests have no audio.
    return msgspec.structs.replace(options, enable_prefix_caching=False, use_warmup=False)


def check_audio(request: EngineRequest, config: ModelConfig, info: ModelInfo) -> None:
    """Raise ``PenstockError`` if a speech-to-text model gets no valid audio, or if another model gets audio."""
    audio, speech = request.audio, config.speech
    if not speech:
        if audio:
            message = "audio: this model does not support audio input; send text, or use a speech-to-text model"
            raise PenstockError(Code.UNSUPPORTED, message, "audio")
        return
    if audio is None:
        message = "this is a speech-to-text model: send a file to /v1/audio/transcriptions"
        raise PenstockError(Code.UNSUPPORTED, message)
    shape = (speech.num_bins, speech.num_frames)
    if (audio.bins, audio.frames) != shape or len(audio.features) != 4 * shape[0] * shape[1]:
        size = f"{audio.frames} frames of {audio.bins} mel bins in {len(audio.features)} bytes"
        raise invalid("audio", f"must have {shape[1]} frames of {shape[0]} float32 mel bins for this model; has {size}")
    rules = audio.rules
    forced = (token for choices in rules.forced for token in choices)
    unknown = [
        token
        for token in (rules.eos, *rules.suppressed, *rules.suppressed_first, *forced)
        if not 0 <= token < info.vocab_size
    ]
    if unknown:
        message = f"has decoding rules with token id {unknown[0]}; token ids go from 0 to {info.vocab_size - 1}"
        raise invalid("audio", message, info.vocab_size - 1)
    if not all(rules.forced):
        raise invalid("audio", "has decoding rules with an empty list of forced tokens; list at least one token")
    if not (rules.timestamp_begin == 0 or rules.eos < rules.timestamp_begin < info.vocab_size):
        message = f"has timestamp_begin {rules.timestamp_begin}; must be 0, or from {rules.eos + 1} to"
        raise invalid("audio", f"{message} {info.vocab_size - 1}")
    if audio.alignment:
        _check_alignment(audio.alignment, request, config)
    sampling = request.sampling
    if max(sampling.n, sampling.best_of or 1) > 1 or sampling.guided_decoding:
        message = "audio: transcriptions do not support n > 1, best_of > 1 or guided decoding; remove these parameters"
        raise PenstockError(Code.UNSUPPORTED, message, "audio")


def _check_alignment(alignment: Alignment, request: EngineRequest, config: ModelConfig) -> None:
    """Raise ``PenstockError`` (``invalid``) for an alignment (token timestamps) that the model cannot compute."""
    if not request.pooling or request.pooling.pooling_type not in (None, "last"):
        raise invalid("audio", "has an alignment, which requires a pooling request with pooling_type last")
    heads = {0 <= layer < config.num_layers and 0 <= head < config.num_heads for layer, head in alignment.heads}
    if heads != {True}:
        message = f"layers 0 to {config.num_layers - 1}, heads 0 to {config.num_heads - 1}"
        raise invalid("audio", f"must have alignment heads that are attention heads of the model ({message})")
    if not 0 < alignment.start < len(request.prompt):
        message = f"must have an alignment that starts at token 1 to {len(request.prompt) - 1} of the prompt"
        raise invalid("audio", f"{message}, not at {alignment.start}")
    assert config.speech
    if not 0 < alignment.length <= config.speech.num_positions:
        message = f"must have an alignment of 1 to {config.speech.num_positions} hidden states"
        raise invalid("audio", f"{message}, not {alignment.length}")
