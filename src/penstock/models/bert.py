"""BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): learned positions,
token types, and a norm after each sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.encoder_config import encoder_fields
from penstock.checkpoint.encoders import SUFFIXES, first_position
from penstock.checkpoint.model_config import ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError
from penstock.layers import MLP, BidirectionalAttention, BuildContext, LayerNorm, PoolerHead
from penstock.layers.pooler import dense

from .encoder import Encoder, PostNormLayer, module_name, position_and_type_table
from .registry import Family
from .stored import Stored

EMBEDDINGS = "embeddings.word_embeddings"
PROJECTIONS = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "o_proj": "output.dense"}
"""Of attention, by the names that layers ask for."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise PenstockError(Code.UNSUPPORTED, "BERT as a decoder (is_decoder)", "model")
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise PenstockError(Code.UNSUPPORTED, f"position_embedding_type {kind!r:.40}; absolute is supported", "model")
    return read_bert_config(raw)


def read_bert_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The names that BERT and its successors share."""
    eps = float(raw.get("layer_norm_eps") or 1e-12)
    return dense_config(raw, **encoder_fields(raw), rms_norm_eps=eps, options=options_of({"hidden_act": "gelu", **raw}))


def find_stored(config: ModelConfig, name: str) -> Stored:
    """``Family.find_stored``."""
    parent, _, last = name.rpartition(".")
    return Stored(f"{parent}.{PROJECTIONS[last]}" if last in PROJECTIONS else name)


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


FAMILY = Family(
    architectures=tuple(kind + end for kind in ("Bert", "Roberta", "XLMRoberta") for end in SUFFIXES),
    read_config=read_config,
    build=build,
    build_classifier=build_classifier,
    find_stored=find_stored,
)
