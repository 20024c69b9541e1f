"""BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): learned positions,
token types, post-norm."""

from penstock.checkpoint.encoders import SUFFIXES, encoder_fields
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family, imported
from ..stored import Stored

PROJECTIONS = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "o_proj": "output.dense"}
"""Projections of attention: name in layers → name in the checkpoint."""


def read_config(raw: ConfigJson) -> ModelConfig:
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        message = "BERT as a decoder (is_decoder or add_cross_attention is true) is not supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        message = f"position_embedding_type is {kind!r:.40}; only absolute is supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return read_bert_config(raw)


def read_bert_config(raw: ConfigJson) -> ModelConfig:
    """Read the configuration of BERT, RoBERTa or GTE."""
    eps = float(raw.get("layer_norm_eps") or 1e-12)
    return dense_config(
        raw, **encoder_fields(raw), rms_norm_eps=eps, options=options_of({"hidden_act": "gelu", **raw}, gated_mlp=False)
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    parent, _, last = name.rpartition(".")
    return Stored(f"{parent}.{PROJECTIONS[last]}" if last in PROJECTIONS else name)


FAMILY = Family(
    architectures=tuple(kind + end for kind in ("Bert", "Roberta", "XLMRoberta") for end in SUFFIXES),
    read_config=read_config,
    build=imported("penstock.models.bert:build"),
    build_classifier=imported("penstock.models.bert:build_classifier"),
    find_stored=find_stored,
)
