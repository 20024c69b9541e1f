"""A ``config.json`` with what it leaves out: defaults of its class, rotary positions in one spelling, and the fields of
``text_config`` beside those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_defaults import ConfigClass, class_named, class_of, with_defaults
from .rope import with_rope_parameters

PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
"""Default of LLaVA-OneVision's ``image_grid_pinpoints``."""
OF_WHOLE_MODEL = (
    *("architectures", "model_type", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder", "transformers_version"),
)
"""Fields for which the top level has precedence over ``text_config``."""


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` in which all fields are explicit. Those of the language model of a model that sees images are
    at the top, also where the file has them in ``text_config``.

    Raises ``AttributeError``, ``TypeError`` or ``ValueError`` where a value is of the wrong kind.
    """
    known = class_of(config)
    if known is not None and not config.get("architectures"):
        config = {**config, "architectures": [known.architecture]}
    if known is not None and known.text_config:
        return _composite(config, known)
    text = config.get("text_config")
    if isinstance(text, dict) and known is None:
        return {**{name: value for name, value in text.items() if value is not None and name != "model_type"}, **config}
    if isinstance(text, dict):  # a composite whose architecture is that of its language model
        whole = {name: config[name] for name in OF_WHOLE_MODEL if config.get(name) is not None}
        config = {**config, **text, **whole}
    complete = with_defaults(config, known)
    if known is None or known.rope is None:
        return complete
    return with_rope_parameters(complete, known)


def _composite(config: Mapping[str, Any], known: ConfigClass) -> dict[str, Any]:
    """A configuration with ``text_config`` and ``vision_config``."""
    given = config.get("text_config")
    if given is None:  # early files have the text's fields among their own
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
    fields = {name: value for name, value in text.items() if not (name in OF_WHOLE_MODEL and name in whole)}
    return {**whole, **fields, "text_config": text}


def _vision(given: Mapping[str, Any] | None, known: ConfigClass) -> dict[str, Any]:
    """``vision_config``. Some early files name the whole model's class in it."""
    vision = known.vision_config if given is None else given
    kind = vision.get("model_type")
    kind = known.vision_config["model_type"] if not kind or kind == known.model_type else kind
    return with_defaults({**vision, "model_type": kind}, class_named(kind))


OWN_FIELD_ONLY = ("qwen3_vl", "qwen3_vl_moe")
"""Models whose class in transformers never reads ``tie_word_embeddings`` of ``text_config``."""


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], known: ConfigClass) -> bool:
    """Whether embeddings are tied: the model's own field decides, and then that of ``text_config``."""
    top, nested = config.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    if known.model_type in OWN_FIELD_ONLY:
        nested = None
    if not known.fields["tie_word_embeddings"] and nested:  # as the library forwards it
        return True
    return bool(next((value for value in (top, nested) if value is not None), known.fields["tie_word_embeddings"]))
