"""BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): learned positions,
token types, post-norm."""

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
    """Build BERT, or an encoder that differs from BERT in norms, MLP or positions.

    Args:
        norms: names of the norms after a layer's attention and after its MLP.
        mlp: builds the MLP of a layer from the layer's name.
        rope: ``[max_len, head_dim]`` from ``BuildContext.rope_table``; None: learned positions.
    """
    name = module_name(context, config, EMBEDDINGS)
    size, eps = config.hidden_size, config.rms_norm_eps

    def layer(number: int) -> PostNormLayer:
        layer_name = f"{name}encoder.layer.{number}"
        heads, head_dim = config.num_heads, config.head_dim
        return PostNormLayer(
            context.ops,
            BidirectionalAttention(
                context, f"{layer_name}.attention", hidden_size=size, num_heads=heads, head_dim=head_dim, rope=rope
            ),
            LayerNorm(context, f"{layer_name}.{norms[0]}", size, eps, bias=True),
            mlp(layer_name),
            LayerNorm(context, f"{layer_name}.{norms[1]}", size, eps, bias=True),
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
    def mlp(layer_name: str) -> MLP:
        names = f"{layer_name}.intermediate.dense", f"{layer_name}.output.dense"
        sizes = config.hidden_size, config.intermediate_size
        return MLP(context, names, *sizes, bias=True, activation=config.options.activation)

    return build_encoder(context, config, ("attention.output.LayerNorm", "output.LayerNorm"), mlp)


def build_classifier(context: BuildContext, config: ModelConfig) -> PoolerHead:
    """Build BERT's pooler and classifier, or RoBERTa's classification head."""
    assert config.encoder
    size, labels, prefix = config.hidden_size, config.num_labels, config.encoder.prefix
    first, last = f"{module_name(context, config, EMBEDDINGS)}pooler.dense", "classifier"
    if prefix == "roberta":
        first, last = "classifier.dense", "classifier.out_proj"
    return PoolerHead([dense(context, first, size, size, "tanh"), dense(context, last, size, labels)], labels)
