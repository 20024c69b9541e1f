"""Completion of ``config.json``: defaults of its configuration class, uniform rotary parameters, and the fields of
``text_config`` at the top level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_defaults import ConfigClass, class_named, class_of, with_defaults
from .rope import with_rope_parameters

PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
"""Default of LLaVA-OneVision's ``image_grid_pinpoints``."""
TOP_LEVEL_FIELDS = (
    *("architectures", "model_type", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder", "transformers_version"),
)
"""Fields whose top-level value takes precedence over ``text_config``."""


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with all fields explicit. Fields of ``text_config`` are also at the top level.

    Raises ``AttributeError``, ``TypeError`` or ``ValueError`` for a value of the wrong type.
    """
    known = class_of(config)
    if known is not None and not config.get("architectures"):
        config = {**config, "architectures": [known.architecture]}
    if known is not None and known.text_config:
        return _composite(config, known)
    text = config.get("text_config")
    if isinstance(text, dict) and known is None:
        return {**{name: value for name, value in text.items() if value is not None and name != "model_type"}, **config}
    if isinstance(text, dict):  # a multimodal file that names the language model in `architectures`
        top_level = {name: config[name] for name in TOP_LEVEL_FIELDS if config.get(name) is not None}
        config = {**config, **text, **top_level}
    complete = with_defaults(config, known)
    if known is None or known.rope is None:
        return complete
    return with_rope_parameters(complete, known)


def _composite(config: Mapping[str, Any], known: ConfigClass) -> dict[str, Any]:
    """A configuration with ``text_config`` and ``vision_config``."""
    given = config.get("text_config")
    if given is None:  # early files have the text fields at the top level
        given = config if config.get("hidden_size") else known.text_config
        text = {**given, "model_type": known.text_config["model_type"]}
        text.pop("vision_config", None)
    else:
        text = {**given, "model_type": given.get("model_type") or known.text_config["model_type"]}
    text_class = class_named(text["model_type"])
    tied = _tied(config, text, known)
    text = with_rope_parameters(with_defaults(text, text_class), text_class)
    whole = with_defaults(config, known) | {"tie_word_embeddings": tied}
    if known.model_type == "llava_onevision" and whole.get("image_grid_pinpoints") is None:
        whole["image_grid_pinpoints"] = PINPOINTS
    whole["vision_config"] = _vision(config.get("vision_config"), known)
    fields = {name: value for name, value in text.items() if not (name in TOP_LEVEL_FIELDS and name in whole)}
    return {**whole, **fields, "text_config": text}


def _vision(given: Mapping[str, Any] | None, known: ConfigClass) -> dict[str, Any]:
    """``vision_config`` with defaults. In some early files its ``model_type`` is that of the whole model."""
    vision = known.vision_config if given is None else given
    kind = vision.get("model_type")
    kind = known.vision_config["model_type"] if not kind or kind == known.model_type else kind
    return with_defaults({**vision, "model_type": kind}, class_named(kind))


TOP_LEVEL_TIE_ONLY = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""``model_type`` of models for which transformers ignores ``tie_word_embeddings`` of ``text_config``."""


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], known: ConfigClass) -> bool:
    """True if embeddings are tied. The top-level field has precedence over ``text_config``, then the class default."""
    top, nested = config.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    if known.model_type in TOP_LEVEL_TIE_ONLY:
        nested = None
    if not known.fields["tie_word_embeddings"] and nested:  # transformers copies the value of text_config
        return True
    return bool(next((value for value in (top, nested) if value is not None), known.fields["tie_word_embeddings"]))
