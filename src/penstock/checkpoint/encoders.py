"""Encoder architectures and their fields of ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core import Code, PenstockError

from .config_defaults import CLASSIFIER, class_named

PREFIXES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "ModernBert": "model", "Gte": "gte"}
"""Prefix of architectures → prefix of the encoder's tensor names in checkpoints with a head."""
SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Suffixes of architectures. The heads for masked language modeling and pretraining are not loaded."""


def encoder_prefix(config: Mapping[str, Any]) -> str | None:
    """Prefix of an encoder's tensor names in a checkpoint with a head; None for decoders."""
    name = architecture_name(config)
    return next((PREFIXES[name.removesuffix(end)] for end in SUFFIXES if name.removesuffix(end) in PREFIXES), None)


def architecture_name(config: Mapping[str, Any]) -> str:
    """The first of ``architectures``; if absent, the architecture of the ``model_type``."""
    known = class_named(config.get("model_type"))
    default = known.architecture if known and known.architecture else "none"
    return str(next(iter(config.get("architectures") or [default])))


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has a classifier of texts, or of pairs of texts (cross-encoder)."""
    return architecture_name(config).endswith(CLASSIFIER)


def num_labels(config: Mapping[str, Any]) -> int:
    """Number of outputs of a classifier."""
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


def max_encoder_len(config: Mapping[str, Any]) -> int:
    """Maximum number of tokens of an encoder. RoBERTa's first position is the id of the padding token + 1."""
    positions = int(config.get("max_position_embeddings") or 512)
    return positions - first_position(config)


def first_position(config: Mapping[str, Any]) -> int:
    """Position of the first token in the table of learned positions."""
    return int(config.get("pad_token_id") or 0) + 1 if encoder_prefix(config) == "roberta" else 0


@dataclass(frozen=True)
class EncoderConfig:
    """Fields of an encoder that decoders do not have."""

    prefix: str
    """Prefix of tensor names in checkpoints with a head."""
    type_vocab_size: int
    """Number of token types (BERT's first and second text); 0 if the model has none."""


def encoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``dense_config`` for an encoder.

    Raises ``PenstockError`` (``unsupported``) for an encoder used as a decoder (``BertLMHeadModel``).
    """
    if (prefix := encoder_prefix(raw)) is None:
        message = f"architecture {architecture_name(raw)} uses an encoder as a decoder, which is not supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return {
        "encoder": EncoderConfig(prefix, int(raw.get("type_vocab_size") or 0)),
        "max_model_len": max_encoder_len(raw),
        "tie_word_embeddings": True,
        "has_lm_head": False,
        "num_mtp_layers": 0,
    }
