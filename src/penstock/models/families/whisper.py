"""Whisper (Radford et al., 2022): an audio encoder, and a decoder with learned positions and cross-attention."""

from dataclasses import replace

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.speech import WHISPER, SpeechConfig
from penstock.core import Code, PenstockError

from ..registry import Family, imported


def read_config(raw: ConfigJson) -> ModelConfig:
    name = str(raw.get("activation_function") or "gelu")
    if name != "gelu":
        message = f"activation_function is {name[:40]!r}; only gelu is supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    speech = SpeechConfig(
        num_bins=int(raw["num_mel_bins"]),
        num_layers=int(raw["encoder_layers"]),
        num_heads=int(raw["encoder_attention_heads"]),
        intermediate_size=int(raw["encoder_ffn_dim"]),
        num_positions=int(raw["max_source_positions"]),
        median_filter_width=int(raw.get("median_filter_width", 7)),
    )
    config = dense_config(raw, options=options_of({"hidden_act": name}, gated_mlp=False))
    if config.hidden_size % speech.num_heads:
        heads = f"encoder_attention_heads, {speech.num_heads}"
        raise ValueError(f"d_model is {config.hidden_size}; it must be a multiple of {heads}")
    if speech.median_filter_width < 1 or speech.median_filter_width % 2 == 0:
        raise ValueError(f"median_filter_width is {speech.median_filter_width}; it must be odd and positive")
    return replace(config, speech=speech, has_lm_head=True)


FAMILY = Family((WHISPER,), read_config, imported("penstock.models.whisper:build"))
