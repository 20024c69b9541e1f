"""Defaults of ``config.json``: an absent field has the default of the configuration class in transformers.

``config_defaults.json`` has the defaults; the tests' ``config_classes.py`` writes it from the library. Llama's defaults
do not fit all families: they differ in the RoPE base, sliding window and soft caps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CLASSIFIER = "ForSequenceClassification"
"""Suffix of architectures with a classifier."""
ENDS = (CLASSIFIER, "ForMaskedLM", "ForPreTraining", "ForCausalLM", "Model")
"""Suffixes of architectures with the same configuration class."""
INTERNLM2 = {
    "fields": {
        **{"vocab_size": 103_168, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "bias": True},
    },
    "architecture": "InternLM2ForCausalLM",
    "rope": {"rope_theta": 10_000.0},
}
"""Configuration class that InternLM 2 checkpoints contain as Python code; transformers has no such class."""
SPELLINGS = {
    "Ernie4_5_ForCausalLM": "ernie4_5",
    "Ernie4_5_MoEForCausalLM": "ernie4_5_moe",
    "InternLM3ForCausalLM": "internlm3",
}
"""Architecture names unknown to transformers → ``model_type``."""


@dataclass(frozen=True)
class ConfigClass:
    """A configuration class of transformers."""

    model_type: str
    fields: Mapping[str, Any]
    """Default values, without those that are ``None``."""
    nullable: tuple[str, ...] = ()
    """Fields for which ``null`` differs from absent."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alias → field name. The value of an alias takes precedence."""
    architecture: str = ""
    """Model class of transformers; empty for classes of nested objects."""
    rope: Mapping[str, Any] | None = None
    """Defaults of rotary parameters; None: no rotary embedding, or a two-dimensional one."""
    text_config: Mapping[str, Any] = field(default_factory=dict)
    """Default of an absent ``text_config``. A ``text_config`` without ``model_type`` gets that of this default. Empty:
    the class has no ``text_config``."""
    vision_config: Mapping[str, Any] = field(default_factory=dict)
    """Default of ``vision_config``, used as ``text_config`` is."""


@cache
def _classes() -> Mapping[str, ConfigClass]:
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")) | {"internlm2": INTERNLM2}
    return {name: ConfigClass(name, **entry) for name, entry in table.items()}


@cache
def _by_architecture() -> Mapping[str, ConfigClass]:
    classes = _classes()
    named = {each.architecture: each for each in classes.values() if each.architecture}
    named["LlamaForCausalLM"] = classes["llama"]  # also the model class of internlm3 in transformers
    return named | {name: classes[kind] for name, kind in SPELLINGS.items()}


def class_named(model_type: Any) -> ConfigClass | None:
    """The class of a ``model_type``; None for an unknown one."""
    return _classes().get(model_type) if isinstance(model_type, str) else None


def class_of(config: Mapping[str, Any]) -> ConfigClass | None:
    """The class of a ``config.json``: by its architecture, which selects the model's code, else by ``model_type``.
    None if neither is known."""
    name = str(next(iter(config.get("architectures") or [""])))
    stem = next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)
    known = _by_architecture()
    named = class_named(config.get("model_type"))
    if named is not None and named.architecture == name:
        return named
    found = next((known[each] for each in (name, f"{stem}ForCausalLM", f"{stem}Model") if each in known), None)
    return found or named


def with_defaults(config: Mapping[str, Any], known: ConfigClass | None) -> dict[str, Any]:
    """A configuration with aliases resolved and the defaults of its class. ``null`` counts as absent, except in
    ``nullable`` fields: ``sliding_window: null`` means full attention."""
    if known is None:
        return dict(config)
    given = {name: value for name, value in config.items() if value is not None or name in known.nullable}
    given |= {name: given[alias] for alias, name in known.aliases.items() if given.get(alias) is not None}
    return {**config, **known.fields, **given}
