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
"""Maximum number of running sequences: each needs memory for the cross-attention KV of its audio window."""


def speech_options(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """Adapt the options to a speech-to-text model.

    Raises ``PenstockError`` (``unsupported``), with the option as its field, for options that it does not support.
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
            message = f"{name}: {getattr(options, name)} is not supported for speech-to-text models"
            raise PenstockError(Code.UNSUPPORTED, message, name)
    if config.quantization_config:
        message = "model: quantized checkpoints of speech-to-text models are not supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if options.max_num_seqs > MAX_SEQUENCES:
        logger.info("max_num_seqs is lowered to %d, the maximum for speech-to-text models", MAX_SEQUENCES)
        options = msgspec.structs.replace(options, max_num_seqs=MAX_SEQUENCES)
    # no prefix caching: equal prompts have different audio; no warm-up: its requests have no audio
    return msgspec.structs.replace(options, enable_prefix_caching=False, use_warmup=False)


def check_audio(request: EngineRequest, config: ModelConfig, info: ModelInfo) -> None:
    """Raise ``PenstockError`` for requests without valid audio to a speech-to-text model, and with audio to others."""
    audio, speech = request.audio, config.speech
    if not speech:
        if audio:
            raise PenstockError(Code.UNSUPPORTED, "audio: this model does not support audio input", "audio")
        return
    if audio is None:
        message = "this is a speech-to-text model: send a file to /v1/audio/transcriptions"
        raise PenstockError(Code.UNSUPPORTED, message)
    shape = (speech.num_bins, speech.num_frames)
    if (audio.bins, audio.frames) != shape or len(audio.features) != 4 * shape[0] * shape[1]:
        raise invalid("audio", f"must have {shape[1]} frames of {shape[0]} mel bins for this model")
    rules = audio.rules
    tokens = {rules.eos, *rules.suppressed, *rules.suppressed_first, *(each for few in rules.forced for each in few)}
    if not all(0 <= token < info.vocab_size for token in tokens) or not all(rules.forced):
        raise invalid("audio", "has decoding rules with token ids that the model does not have")
    if not (rules.timestamp_begin == 0 or rules.eos < rules.timestamp_begin < info.vocab_size):
        raise invalid("audio", "has a timestamp_begin that is not a timestamp token of the model")
    if audio.alignment:
        _check_alignment(audio.alignment, request, config)
    sampling = request.sampling
    if max(sampling.n, sampling.best_of or 1) > 1 or sampling.guided_decoding:
        message = "audio: n, best_of and guided decoding are not supported for transcriptions"
        raise PenstockError(Code.UNSUPPORTED, message, "audio")


def _check_alignment(alignment: Alignment, request: EngineRequest, config: ModelConfig) -> None:
    """Raise ``PenstockError`` (``invalid``) for an alignment (token timestamps) that the model cannot compute."""
    if not request.pooling or request.pooling.pooling_type not in (None, "last"):
        raise invalid("audio", "has an alignment, which requires the pooling type last")
    heads = {0 <= layer < config.num_layers and 0 <= head < config.num_heads for layer, head in alignment.heads}
    if heads != {True}:
        raise invalid("audio", "has an alignment with attention heads that the model does not have")
    if not 0 < alignment.start < len(request.prompt):
        raise invalid("audio", "has an alignment that does not start within the prompt")
    assert config.speech
    if not 0 < alignment.length <= config.speech.num_positions:
        raise invalid("audio", f"must have an alignment of 1 to {config.speech.num_positions} hidden states")
