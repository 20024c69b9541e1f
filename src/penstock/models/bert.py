"""BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): learned positions,
token types, and a norm after each sum."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.checkpoint.encoders import first_position
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import MLP, BidirectionalAttention, BuildContext, LayerNorm, MLPLayer, PoolerHead
from penstock.layers.pooler import dense

from .encoder import Encoder, PostNormLayer, module_name, position_and_type_table

EMBEDDINGS = "embeddings.word_embeddings"


def build_encoder(
    context: BuildContext,
    config: ModelConfig,
    norms: tuple[str, str],
    mlp: Callable[[str], MLPLayer],
    rope: Tensor | None = None,
) -> Encoder:
    """BERT, or an encoder that differs from it in what is given.

    Args:
        norms: names of the norms after a layer's attention and after its feed-forward layer.
        mlp: builds the feed-forward layer of the layer of a name.
        rope: as for ``BidirectionalAttention``; None: learned positions.
    """
    name = module_name(context, config, EMBEDDINGS)
    size, eps = config.hidden_size, config.rms_norm_eps

    def layer(number: int) -> PostNormLayer:
        own = f"{name}encoder.layer.{number}"
        heads, head_dim = config.num_heads, config.head_dim
        return PostNormLayer(
            context.ops,
            BidirectionalAttention(
                context, f"{own}.attention", hidden_size=size, num_heads=heads, head_dim=head_dim, rope=rope
            ),
            LayerNorm(context, f"{own}.{norms[0]}", size, eps, bias=True),
            mlp(own),
            LayerNorm(context, f"{own}.{norms[1]}", size, eps, bias=True),
            last=number == config.num_layers - 1,
        )

    return Encoder(
        context,
        config,
        embeddings=f"{name}embeddings.word_embeddings",
        embedding_norm=f"{name}embeddings.LayerNorm",
        norm_bias=True,
        added=position_and_type_table(context, config, f"{name}embeddings", first_position(config.raw), rope is None),
        layer=layer,
    )


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Encoder:
    def mlp(own: str) -> MLP:
        names, sizes = (
            (f"{own}.intermediate.dense", f"{own}.output.dense"),
            (config.hidden_size, config.intermediate_size),
        )
        return MLP(context, names, *sizes, bias=True, activation=config.options.activation)

    return build_encoder(context, config, ("attention.output.LayerNorm", "output.LayerNorm"), mlp)


def build_classifier(context: BuildContext, config: ModelConfig) -> PoolerHead:
    """BERT's pooler and classifier, or RoBERTa's classification head."""
    assert config.encoder
    size, labels, prefix = config.hidden_size, config.num_labels, config.encoder.prefix
    first, last = f"{module_name(context, config, EMBEDDINGS)}pooler.dense", "classifier"
    if prefix == "roberta":
        first, last = "classifier.dense", "classifier.out_proj"
    return PoolerHead([dense(context, first, size, size, "tanh"), dense(context, last, size, labels)], labels)
