"""Models that transcribe audio: what they do not support, and how many sequences run at the same time."""

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
"""That run at the same time: each has room for the keys and values of a window of audio, in every layer."""


def speech_options(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """The options for a model that transcribes audio. Raises ``PenstockError`` (``unsupported``), with the option as
    its field, for those that such a model does not have."""
    for name, asked in {
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
        if asked:
            message = f"{name}: models that transcribe audio are not run with {getattr(options, name)}"
            raise PenstockError(Code.UNSUPPORTED, message, name)
    if config.quantization_config:
        raise PenstockError(Code.UNSUPPORTED, "models that transcribe audio are not run quantized", "model")
    if options.max_num_seqs > MAX_SEQUENCES:
        logger.info("at most %d windows of audio are transcribed at the same time", MAX_SEQUENCES)
        options = msgspec.structs.replace(options, max_num_seqs=MAX_SEQUENCES)
    # cached prefixes would be of other audio, and requests of a warm-up have none
    return msgspec.structs.replace(options, enable_prefix_caching=False, use_warmup=False)


def check_audio(request: EngineRequest, config: ModelConfig, info: ModelInfo) -> None:
    """Refuse requests without audio, of models that transcribe it, and with audio, of others. Raises
    ``PenstockError``."""
    audio, speech = request.audio, config.speech
    if not speech:
        if audio:
            raise PenstockError(Code.UNSUPPORTED, "audio: this model hears none, only text", "audio")
        return
    if audio is None:
        message = "this model transcribes audio, and answers no texts: send a file to /v1/audio/transcriptions"
        raise PenstockError(Code.UNSUPPORTED, message)
    shape = (speech.num_bins, speech.num_frames)
    if (audio.bins, audio.frames) != shape or len(audio.features) != 4 * shape[0] * shape[1]:
        raise invalid("audio", f"must have {shape[1]} frames of {shape[0]} mel bins, as this model hears")
    rules = audio.rules
    tokens = {rules.eos, *rules.suppressed, *rules.suppressed_first, *(each for few in rules.forced for each in few)}
    if not all(0 <= token < info.vocab_size for token in tokens) or not all(rules.forced):
        raise invalid("audio", "has rules for tokens that the model does not have")
    if not (rules.timestamp_begin == 0 or rules.eos < rules.timestamp_begin < info.vocab_size):
        raise invalid("audio", "has times where the model has none")
    if audio.alignment:
        _check_alignment(audio.alignment, request, config)
    sampling = request.sampling
    if max(sampling.n, sampling.best_of or 1) > 1 or sampling.guided_decoding:
        message = "audio: of a window there is one transcript, without guided decoding"
        raise PenstockError(Code.UNSUPPORTED, message, "audio")


def _check_alignment(alignment: Alignment, request: EngineRequest, config: ModelConfig) -> None:
    """Raise ``PenstockError`` (``invalid``) for times that the model cannot give."""
    if not request.pooling or request.pooling.pooling_type not in (None, "last"):
        raise invalid("audio", "asks for times of tokens, which takes the pooling of the last one")
    heads = {0 <= layer < config.num_layers and 0 <= head < config.num_heads for layer, head in alignment.heads}
    if heads != {True}:
        raise invalid("audio", "asks for times by attention heads that the model does not have")
    if not 0 < alignment.start < len(request.prompt):
        raise invalid("audio", "asks for times of tokens that the prompt does not have")
    assert config.speech
    if not 0 < alignment.length <= config.speech.num_positions:
        raise invalid("audio", f"must have from 1 to {config.speech.num_positions} hidden states")
