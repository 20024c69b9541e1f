"""ModernBERT (Warner et al., 2024): norms before attention and feed-forward layers, rotary positions, gated
feed-forward layers, and windows in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.encoder_config import encoder_fields
from penstock.checkpoint.encoders import SUFFIXES
from penstock.checkpoint.model_config import ModelConfig, activation_of, dense_config, options_of
from penstock.checkpoint.rope import local_rope_parameters_of
from penstock.layers import BidirectionalAttention, BuildContext, GatedMLP, LayerNorm, PoolerHead
from penstock.layers.pooler import dense, norm

from .encoder import Encoder, PreNormLayer, module_name
from .registry import Family
from .stored import Stored, part_of


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
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
    """``Family.find_stored``: ``Wqkv``, ``Wi`` of gate and up, and ``Wo`` of both."""
    parent, _, last = name.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj"):
        return part_of(f"{parent}.Wqkv", [config.hidden_size] * 3, "qkv".index(last[0]))
    if last in ("gate_proj", "up_proj"):
        return part_of(f"{parent}.Wi", [config.intermediate_size] * 2, last == "up_proj")
    return Stored(f"{parent}.Wo" if last in ("o_proj", "down_proj") else name)


def layer_types(raw: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; in older files every ``global_attn_every_n_layers`` one sees everything."""
    every = int(raw.get("global_attn_every_n_layers") or 3)
    layers = range(int(raw["num_hidden_layers"]))
    return raw.get("layer_types") or ["sliding_attention" if number % every else "full_attention" for number in layers]


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    name = module_name(context, config, "embeddings.tok_embeddings")
    raw, size, eps = config.raw, config.hidden_size, config.rms_norm_eps
    norm_bias, mlp_bias = bool(raw.get("norm_bias")), bool(raw.get("mlp_bias"))

    def layer(number: int) -> PreNormLayer:
        own = f"{name}layers.{number}"
        parameters = config.rope_of(number)
        assert parameters is not None
        return PreNormLayer(
            context.ops,
            BidirectionalAttention(
                context,
                f"{own}.attn",
                hidden_size=size,
                num_heads=config.num_heads,
                head_dim=config.head_dim,
                rope=context.rope_table(config.head_dim, parameters, config.max_position_embeddings),
                window=config.sliding_windows[number],
                bias=config.qkv_bias,
            ),
            LayerNorm(context, f"{own}.attn_norm", size, eps, norm_bias) if number else None,
            GatedMLP(context, f"{own}.mlp", size, config.intermediate_size, mlp_bias, config.options.activation),
            LayerNorm(context, f"{own}.mlp_norm", size, eps, norm_bias),
            last=number == config.num_layers - 1,
        )

    return Encoder(
        context,
        config,
        embeddings=f"{name}embeddings.tok_embeddings",
        embedding_norm=f"{name}embeddings.norm",
        norm_bias=norm_bias,
        added=None,
        layer=layer,
        final_norm=f"{name}final_norm",
    )


def build_classifier(context: BuildContext, config: ModelConfig) -> PoolerHead:
    """A dense layer, a norm, and the classifier."""
    raw, size, labels = config.raw, config.hidden_size, config.num_labels
    function = activation_of(str(raw.get("classifier_activation", "gelu")))
    return PoolerHead(
        [
            dense(context, "head.dense", size, size, function, bias=bool(raw.get("classifier_bias"))),
            norm(context, "head.norm", size, config.rms_norm_eps, bool(raw.get("norm_bias"))),
            dense(context, "classifier", size, labels),
        ],
        labels,
    )


FAMILY = Family(
    architectures=tuple(f"ModernBert{end}" for end in SUFFIXES),
    read_config=read_config,
    build=build,
    build_classifier=build_classifier,
    find_stored=find_stored,
)
