"""BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): learned positions,
token types, and a norm after each sum."""

from __future__ import annotations

from penstock.checkpoint.encoders import first_position
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import MLP, BidirectionalAttention, BuildContext, LayerNorm, PoolerHead
from penstock.layers.pooler import dense

from .encoder import Encoder, PostNormLayer, module_name, position_and_type_table

EMBEDDINGS = "embeddings.word_embeddings"


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    name = module_name(context, config, EMBEDDINGS)
    size, eps = config.hidden_size, config.rms_norm_eps

    def layer(number: int) -> PostNormLayer:
        own = f"{name}encoder.layer.{number}"
        return PostNormLayer(
            context.ops,
            BidirectionalAttention(
                context,
                f"{own}.attention",
                hidden_size=size,
                num_heads=config.num_heads,
                head_dim=config.head_dim,
            ),
            LayerNorm(context, f"{own}.attention.output.LayerNorm", size, eps, bias=True),
            MLP(
                context,
                (f"{own}.intermediate.dense", f"{own}.output.dense"),
                size,
                config.intermediate_size,
                bias=True,
                activation=config.options.activation,
            ),
            LayerNorm(context, f"{own}.output.LayerNorm", size, eps, bias=True),
            last=number == config.num_layers - 1,
        )

    return Encoder(
        context,
        config,
        embeddings=f"{name}embeddings.word_embeddings",
        embedding_norm=f"{name}embeddings.LayerNorm",
        norm_bias=True,
        added=position_and_type_table(context, config, f"{name}embeddings", first_position(config.raw)),
        layer=layer,
    )


def build_classifier(context: BuildContext, config: ModelConfig) -> PoolerHead:
    """BERT's pooler and classifier, or RoBERTa's classification head."""
    assert config.encoder
    size, labels, prefix = config.hidden_size, config.num_labels, config.encoder.prefix
    first, last = f"{module_name(context, config, EMBEDDINGS)}pooler.dense", "classifier"
    if prefix == "roberta":
        first, last = "classifier.dense", "classifier.out_proj"
    return PoolerHead([dense(context, first, size, size, "tanh"), dense(context, last, size, labels)], labels)
