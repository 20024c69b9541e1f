"""Defaults of the configuration classes of transformers that Penstock implements (``checkpoint/config_defaults.json``).

``python tests/support/config_classes.py`` updates that file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import penstock

SOURCES = Path(penstock.__file__).parent
TABLE = SOURCES / "checkpoint" / "config_defaults.json"
TEXT = (
    *("bert", "roberta", "xlm-roberta", "modernbert", "gte"),
    *(
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "dots1",
        "ernie4_5",
    ),
    *("ernie4_5_moe", "exaone4", "gemma", "gemma3n_text"),
    *("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite"),
    *("granitemoe", "hunyuan_v1_dense"),
    *("bloom", "falcon", "falcon_mamba", "jamba", "lfm2", "lfm2_moe", "mamba", "recurrent_gemma"),
    *(
        "hunyuan_v1_moe",
        "internlm3",
        "llama",
        "llama4_text",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
    ),
    *("olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "whisper"),
    *("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "minimax", "mpt"),
)
"""``model_type`` of text models, encoders first, and of the speech model."""
COMPOSITE = (
    *("ernie4_5_vl_moe", "gemma3", "internvl", "llama4", "llava", "llava_onevision", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("gemma3n", "gemma4", "gemma4_unified"),
)
"""``model_type`` of models with ``text_config`` and ``vision_config``."""
NESTED = (
    *("ernie4_5_vl_moe_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("siglip_vision_model", "clip_vision_model", "pixtral", "internvl_vision", "ernie4_5_vl_moe_vision"),
    *("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision"),
    *("qwen3_5_vision", "qwen3_5_moe_vision"),
)
"""``model_type`` of the nested configurations."""
FILLED_IN = {"ernie4_5_vl_moe_text": ("moe_intermediate_size",)}
"""Fields with the default None that the class replaces by a constant."""
IGNORED = (
    *("bos_token_id", "eos_token_id", "decoder_start_token_id", "begin_suppress_tokens"),
    *("num_mtp_layers", "rope_parameters", "text_config", "vision_config"),
    *("dtype", "dropout", "use_cache", "is_encoder_decoder"),
)
"""Fields that the table omits: token ids, which the tokenizer defines; draft layers, which a checkpoint must state;
nested objects; fields that do not affect a model's outputs."""

ROPE_IGNORED = ("rope_theta", "type", "max_position_embeddings")
"""Fields of ``rope_parameters`` that have separate entries in the table, or that no RoPE type reads."""


@cache
def names_read() -> frozenset[str]:
    """String literals in the sources that read ``config.json``; they include all field names."""
    paths = [
        path for part in ("checkpoint", "planning", "models", "frontend") for path in (SOURCES / part).rglob("*.py")
    ]
    return frozenset(name for path in paths for name in re.findall(r'"([a-z0-9_]+)"', path.read_text()))


def class_of(model_type: str) -> Any:
    """The configuration class of a ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    for outer in COMPOSITE:
        for found in CONFIG_MAPPING[outer].sub_configs.values():
            if getattr(found, "model_type", "") == model_type:
                return found
    raise KeyError(model_type)


def architecture_of(model_type: str) -> str | None:
    """Name of transformers' model class for a ``model_type``; None if transformers has no such class."""
    from transformers.models.auto import modeling_auto as auto

    tables = (
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
        if model_type in (*COMPOSITE, "whisper")
        else (auto.MODEL_MAPPING_NAMES,)
        if model_type in TEXT[:5]
        else (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,)
    )
    return next((table[model_type] for table in tables if model_type in table), None)


def entry_of(model_type: str) -> dict[str, Any]:
    """Entry of a configuration class in the table."""
    found = class_of(model_type)
    fields, nullable = {}, []
    ignored = IGNORED if model_type in TEXT[:5] else (*IGNORED, "pad_token_id")
    for field in dataclasses.fields(found):
        name, value = field.name, field.default
        if name in ignored or name not in names_read() or value is None or value is dataclasses.MISSING:
            continue
        fields[name] = list(value) if isinstance(value, tuple) else value
        if "None" in str(field.type):
            nullable.append(name)
    fields |= {name: getattr(found(), name) for name in FILLED_IN.get(model_type, ())}
    if model_type not in NESTED:
        fields["tie_word_embeddings"] = found().tie_word_embeddings
    entry: dict[str, Any] = {"fields": fields}
    if nullable:
        entry["nullable"] = nullable
    names = {field.name for field in dataclasses.fields(found)}
    pairs = [(b, a) if a in names and b not in names else (a, b) for a, b in (found.attribute_map or {}).items()]
    if aliases := {alias: name for alias, name in pairs if name in names and name in names_read()}:
        entry["aliases"] = aliases
    if architecture := architecture_of(model_type):
        entry["architecture"] = architecture
    if model_type in COMPOSITE:
        for name, spec in found.sub_configs_defaults.items():
            if name not in ("text_config", "vision_config"):
                continue
            kind = spec.model_type or spec.config_class.model_type
            given = getattr(spec, "init_kwargs", {})  # absent if the entry is a configuration class
            defaults = {field: value for field, value in given.items() if field in names_read()}
            entry[name] = {"model_type": kind, **defaults}
    elif "rope_parameters" in names and getattr(found, "default_rope_type", "default") == "default":
        entry["rope"] = _rope(found)
    return entry


def _rope(found: Any) -> dict[str, Any]:
    """RoPE defaults of a configuration, as entries of the table."""
    rope = found().rope_parameters
    if "full_attention" in rope:
        return {"rope_theta": {kind: rope[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")}}
    if "main" in rope:  # DeepSeek-V4: layers without and with compressed entries
        return {"rope_theta": rope["main"]["rope_theta"]}
    result = {"rope_theta": rope["rope_theta"]}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        result["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        result["rope_parameters"] = {name: value for name, value in rope.items() if name not in ROPE_IGNORED}
    return result


def table() -> dict[str, Any]:
    """Expected content of ``config_defaults.json``."""
    return {model_type: entry_of(model_type) for model_type in (*TEXT, *COMPOSITE, *NESTED)}


def format_table(content: dict[str, Any]) -> str:
    """Format the table as JSON with one line per class."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(format_table(table()))
