"""StarCoder2 (BigCode, 2024): layer norms, an MLP without a gate, biases in all layers, and a sliding window."""

from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    bias, window = bool(raw.get("use_bias", True)), int(raw.get("sliding_window") or 0)
    options = options_of(
        {**raw, "hidden_act": raw.get("hidden_act") or "gelu_pytorch_tanh"},
        norm=NormOptions("layer", bias=True),
        gated_mlp=False,
    )
    return dense_config(
        raw,
        rms_norm_eps=float(raw.get("norm_epsilon") or 1e-5),
        sliding_windows=(window,) * int(raw["num_hidden_layers"]),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        options=options,
    )


FAMILY = Family(("Starcoder2ForCausalLM",), read_config)
