"""ModernBERT (Warner et al., 2024): pre-norm, rotary embedding, gated MLPs, sliding windows in two of three layers."""

from __future__ import annotations

from penstock.checkpoint.model_config import ModelConfig, activation_of
from penstock.layers import BidirectionalAttention, BuildContext, GatedMLP, LayerNorm, PoolerHead
from penstock.layers.pooler import dense, norm

from .encoder import Encoder, PreNormLayer, module_name


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    name = module_name(context, config, "embeddings.tok_embeddings")
    raw, size, eps = config.raw, config.hidden_size, config.rms_norm_eps
    norm_bias, mlp_bias = bool(raw.get("norm_bias")), bool(raw.get("mlp_bias"))

    def layer(number: int) -> PreNormLayer:
        layer_name = f"{name}layers.{number}"
        parameters = config.rope_of(number)
        assert parameters is not None
        return PreNormLayer(
            context.ops,
            BidirectionalAttention(
                context,
                f"{layer_name}.attn",
                hidden_size=size,
                num_heads=config.num_heads,
                head_dim=config.head_dim,
                rope=context.rope_table(config.head_dim, parameters, config.max_position_embeddings),
                window=config.sliding_windows[number],
                bias=config.qkv_bias,
            ),
            LayerNorm(context, f"{layer_name}.attn_norm", size, eps, norm_bias) if number else None,
            GatedMLP(context, f"{layer_name}.mlp", size, config.intermediate_size, mlp_bias, config.options.activation),
            LayerNorm(context, f"{layer_name}.mlp_norm", size, eps, norm_bias),
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
    """Build ModernBERT's classification head: a dense layer, a norm, and the classifier."""
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
