"""Defaults of ``config.json``: a field that a file leaves out has the value of its configuration class in transformers.

The classes are in ``config_defaults.json``, which ``tests/config_classes.py`` writes and the tests compare with the
library. Where files leave fields out differs between families: the base of rotary positions, a sliding window, or a
soft cap are none of the ``Llama`` defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures with a classifier."""
ENDS = (CLASSIFIER, "ForMaskedLM", "ForPreTraining", "ForCausalLM", "Model")
"""Ends of the names of architectures over the same model."""
INTERNLM2 = {
    "fields": {
        **{"vocab_size": 103_168, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "bias": True},
    },
    "architecture": "InternLM2ForCausalLM",
    "rope": {"rope_theta": 10_000.0},
}
"""The class that InternLM 2's checkpoints ship, which transformers does not have."""
SPELLINGS = {
    "Ernie4_5_ForCausalLM": "ernie4_5",
    "Ernie4_5_MoEForCausalLM": "ernie4_5_moe",
    "InternLM3ForCausalLM": "internlm3",
}
"""``model_type`` of architectures under names that transformers does not have."""


@dataclass(frozen=True)
class ConfigClass:
    """A configuration class of transformers."""

    model_type: str
    fields: Mapping[str, Any]
    """Defaults other than ``None``."""
    nullable: tuple[str, ...] = ()
    """Fields for which ``null`` differs from absent."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields; they win over the fields' own."""
    architecture: str = ""
    """Model class that transformers makes of it; empty for objects within others."""
    rope: Mapping[str, Any] | None = None
    """Defaults of rotary positions; None where there are none, or they have two dimensions."""
    text_config: Mapping[str, Any] = field(default_factory=dict)
    """Object used where a file has none; its ``model_type`` is also that of an object that names none. Empty where the
    class has no such object."""
    vision_config: Mapping[str, Any] = field(default_factory=dict)
    """Same, of ``vision_config``."""


@cache
def _classes() -> Mapping[str, ConfigClass]:
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")) | {"internlm2": INTERNLM2}
    return {name: ConfigClass(name, **entry) for name, entry in table.items()}


@cache
def _by_architecture() -> Mapping[str, ConfigClass]:
    classes = _classes()
    named = {each.architecture: each for each in classes.values() if each.architecture}
    named["LlamaForCausalLM"] = classes["llama"]  # which transformers also makes of InternLM 3
    return named | {name: classes[kind] for name, kind in SPELLINGS.items()}


def class_named(model_type: Any) -> ConfigClass | None:
    """The class of a ``model_type``; None for an unknown one."""
    return _classes().get(model_type) if isinstance(model_type, str) else None


def class_of(config: Mapping[str, Any]) -> ConfigClass | None:
    """The class of a ``config.json``: of its architecture, as this decides what computes it, or of its ``model_type``;
    None where neither is known."""
    name = str(next(iter(config.get("architectures") or [""])))
    stem = next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)
    known = _by_architecture()
    named = class_named(config.get("model_type"))
    if named is not None and named.architecture == name:
        return named
    found = next((known[each] for each in (name, f"{stem}ForCausalLM", f"{stem}Model") if each in known), None)
    return found or named


def with_defaults(config: Mapping[str, Any], known: ConfigClass | None) -> dict[str, Any]:
    """A configuration by the names of its class, with what it leaves out. ``null`` is the same as no field, except
    where it has a meaning: ``sliding_window: null`` is no window."""
    if known is None:
        return dict(config)
    given = {name: value for name, value in config.items() if value is not None or name in known.nullable}
    given |= {name: given[alias] for alias, name in known.aliases.items() if given.get(alias) is not None}
    return {**config, **known.fields, **given}
