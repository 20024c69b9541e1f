"""ModernBERT (Warner et al., 2024): pre-norm, rotary embedding, gated MLPs, sliding windows in two of three layers."""

from penstock.checkpoint.encoders import SUFFIXES, encoder_fields
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, activation_of, dense_config, options_of
from penstock.checkpoint.rope import local_rope_parameters_of

from ..registry import Family, imported
from ..stored import Stored, part_of


def read_config(raw: ConfigJson) -> ModelConfig:
    activation_of(str(raw.get("classifier_activation", "gelu")))
    eps = float(raw.get("norm_eps") or 1e-5)
    window = int(raw.get("local_attention") or 128) // 2 + 1
    windows = tuple(0 if kind == "full_attention" else window for kind in layer_types(raw))
    return dense_config(
        raw,
        **encoder_fields(raw),
        options=options_of(raw, activation=activation_of(str(raw.get("hidden_activation") or "gelu"))),
        rms_norm_eps=eps,
        sliding_windows=windows,
        local_rope_parameters=local_rope_parameters_of(raw),
        qkv_bias=bool(raw.get("attention_bias")),
        output_bias=bool(raw.get("attention_bias")),
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``. Projections are ``Wqkv`` (fused), ``Wi`` (gate and up), ``Wo`` (output, down)."""
    parent, _, last = name.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj"):
        return part_of(f"{parent}.Wqkv", [config.hidden_size] * 3, "qkv".index(last[0]))
    if last in ("gate_proj", "up_proj"):
        return part_of(f"{parent}.Wi", [config.intermediate_size] * 2, last == "up_proj")
    return Stored(f"{parent}.Wo" if last in ("o_proj", "down_proj") else name)


def layer_types(raw: ConfigJson) -> list[str]:
    """Type of each layer. In older files, every ``global_attn_every_n_layers``-th layer has full attention."""
    every = int(raw.get("global_attn_every_n_layers") or 3)
    layers = range(int(raw["num_hidden_layers"]))
    return raw.get("layer_types") or ["sliding_attention" if number % every else "full_attention" for number in layers]


FAMILY = Family(
    architectures=tuple(f"ModernBert{end}" for end in SUFFIXES),
    read_config=read_config,
    build=imported("penstock.models.modernbert:build"),
    build_classifier=imported("penstock.models.modernbert:build_classifier"),
    find_stored=find_stored,
)
