"""Encoders: which architectures they are, and what their configurations mean. Known without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core import Code, PenstockError

from .config_defaults import CLASSIFIER, class_named

PREFIXES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "ModernBert": "model", "Gte": "gte"}
"""How the names of architectures begin, and what the names of tensors begin with where the model has a head."""
SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""How they end. Of a masked language model, and one for pretraining, the head is left out."""


def encoder_prefix(config: Mapping[str, Any]) -> str | None:
    """What the names of an encoder's tensors begin with in a checkpoint of a model with a head; None for decoders."""
    name = architecture_name(config)
    return next((PREFIXES[name.removesuffix(end)] for end in SUFFIXES if name.removesuffix(end) in PREFIXES), None)


def architecture_name(config: Mapping[str, Any]) -> str:
    """The first of ``architectures`` of a ``config.json``, or what its ``model_type`` is of."""
    known = class_named(config.get("model_type"))
    default = known.architecture if known and known.architecture else "none"
    return str(next(iter(config.get("architectures") or [default])))


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has a classifier, of sequences or of pairs (cross-encoders)."""
    return architecture_name(config).endswith(CLASSIFIER)


def num_labels(config: Mapping[str, Any]) -> int:
    """Number of a classifier's outputs."""
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


def max_encoder_len(config: Mapping[str, Any]) -> int:
    """Longest text of an encoder, in tokens. RoBERTa counts positions from behind the padding token's."""
    positions = int(config.get("max_position_embeddings") or 512)
    return positions - first_position(config)


def first_position(config: Mapping[str, Any]) -> int:
    """Position of the first token in the table of learned positions."""
    return int(config.get("pad_token_id") or 0) + 1 if encoder_prefix(config) == "roberta" else 0


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder has besides a ``ModelConfig``."""

    prefix: str
    """What the names of tensors begin with where the model has a head."""
    type_vocab_size: int
    """Token types (BERT's first and second text); 0 where the model has none."""


def encoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``dense_config`` that encoders name in another way.

    Raises ``PenstockError`` (``unsupported``) for the architecture of a decoder, as ``BertLMHeadModel``.
    """
    if (prefix := encoder_prefix(raw)) is None:
        raise PenstockError(Code.UNSUPPORTED, f"{architecture_name(raw)}: an encoder as a decoder", "model")
    return {
        "encoder": EncoderConfig(prefix, int(raw.get("type_vocab_size") or 0)),
        "max_model_len": max_encoder_len(raw),
        "tie_word_embeddings": True,
        "has_lm_head": False,
        "num_mtp_layers": 0,
    }
