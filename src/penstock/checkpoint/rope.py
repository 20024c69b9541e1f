"""Reader of the rotary parameters in ``config.json``, in all spellings, with the precedence of transformers.

transformers 5 has ``rope_parameters``, also nested by layer type; transformers 4 has ``rope_scaling``, ``rope_theta``
and ``partial_rotary_factor``, with ``type`` as the older name of ``rope_type``. A file may have several of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError

from .config_defaults import ConfigClass

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)
"""Layer types, by which ``rope_parameters`` may be nested."""
DEFAULT_BASE = 10_000.0
"""``rope_theta`` of unknown configuration classes."""
BASES = {
    "gemma3_text": {FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
    "gemma3n_text": {FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
    "gemma4_text": {FULL: "", SLIDING: ""},
    "gemma4_unified_text": {FULL: "", SLIDING: ""},
    "modernbert": {FULL: "global_rope_theta", SLIDING: "local_rope_theta"},
    "olmo3": {FULL: "rope_theta", SLIDING: ""},
}
"""``model_type`` with nested ``rope_parameters`` → top-level field with the base of each layer type (empty: absent)."""
PROPORTIONAL = {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
KIND_DEFAULTS = {"gemma4_text": PROPORTIONAL, "gemma4_unified_text": PROPORTIONAL}
"""``model_type`` → rotary parameters of layer types that differ from the default type, if ``config.json`` has none."""
SCALED = {"modernbert": (FULL, SLIDING)}
"""``model_type`` → layer types to which ``rope_scaling`` applies; other models: only ``FULL``."""
REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Required parameters of each ``rope_type``."""
TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "frequency_factors")
"""Supported values of ``rope_type`` (``layers/rope.py``)."""
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
"""Types that read ``original_max_position_embeddings``."""
MROPE_DEFAULT = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "ernie4_5_vl_moe_text")
"""``model_type`` of classes for which older files write ``rope_type`` ``mrope`` instead of ``default``."""
LONGROPE_NAMES = ("su", "yarn")
"""Names of ``longrope`` in early files of Phi-3."""


def with_rope_parameters(config: Mapping[str, Any], known: ConfigClass | None) -> dict[str, Any]:
    """A configuration with complete ``rope_parameters`` (``rope_type``, ``rope_theta``, and the parameters of the
    type) in place of all other spellings; nested by layer type if those of the class are nested.

    Raises ``ValueError`` if the type is not a string, or a parameter of the type is missing.
    """
    rest = {name: value for name, value in config.items() if name != "rope_scaling"}
    if known is not None and isinstance(base := (known.rope or {}).get("rope_theta"), Mapping):
        return rest | {"rope_parameters": _by_kind(config, known.model_type, base)}
    defaults = (known.rope if known else None) or {}
    given = config.get("rope_scaling") or config.get("rope_parameters") or defaults.get("rope_parameters") or {}
    nested = [name for name in KINDS if isinstance(given.get(name), Mapping)]
    if known is not None and nested:
        message = f"rope_parameters are nested by layer type ({nested[0]}); those of {known.model_type} must not be"
        raise ValueError(message)
    kind = known.model_type if known else ""
    if nested:
        rope: dict[str, Any] = {name: _complete(given[name], config, defaults, kind, nested=True) for name in nested}
    else:
        rope = _complete(given, config, defaults, kind)
    return rest | {"rope_parameters": rope}


def _by_kind(config: Mapping[str, Any], model_type: str, bases: Mapping[str, float]) -> dict[str, Any]:
    """Nested ``rope_parameters`` of a class with layer types, also from a file with one object for all layer types."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if given and scaling and not all(given.get(kind) for kind in bases):
        message = f"rope_parameters lack {' or '.join(bases)}, and rope_scaling is also set: remove rope_scaling"
        raise ValueError(message)
    result = {}
    for kind, default in bases.items():
        usual: Mapping[str, Any] = KIND_DEFAULTS.get(model_type, {}).get(kind) or {"rope_type": "default"}
        rope = dict(given.get(kind) or usual)
        if kind in SCALED.get(model_type, (FULL,)):
            rope |= scaling
        name = BASES[model_type][kind]
        base = config.get(name) if name else None
        rope["rope_theta"] = _first(rope.get("rope_theta"), base, default)
        result[kind] = _complete(rope, {**config, "rope_theta": None}, {}, model_type, nested=True)
    return result


def _complete(
    given: Mapping[str, Any],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    model_type: str,
    nested: bool = False,
) -> dict[str, Any]:
    """Complete one object of rotary parameters from the top-level fields and the defaults.

    Args:
        nested: True for the object of one layer type; then a top-level ``original_max_position_embeddings`` is ignored.
    """
    rope = {name: value for name, value in given.items() if name != "type"}
    kind = _first(given.get("rope_type"), given.get("type"), "default")
    if not isinstance(kind, str):
        raise ValueError(f"rope_type is {kind!r:.40}; it must be a string")
    if kind == "mrope" and model_type in MROPE_DEFAULT:
        kind = "default"
    if kind in LONGROPE_NAMES and model_type == "phi3":
        kind = "longrope"
    rope["rope_type"] = kind
    if model_type == "olmo_hybrid" and given.get("rope_theta", 0) is None:
        rope["absent"] = True  # no rotary embedding
    base = _first(given.get("rope_theta"), config.get("rope_theta"), defaults.get("rope_theta"), DEFAULT_BASE)
    rope["rope_theta"] = base if isinstance(base, list) else float(base)
    top_level = _partial_rotary_factor(config, model_type)
    factor = _first(given.get("partial_rotary_factor"), top_level, defaults.get("partial_rotary_factor"))
    if factor is not None:
        rope["partial_rotary_factor"] = float(factor)
    if kind in WITH_ORIGINAL:
        length, top_level = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
        inner = given.get("original_max_position_embeddings")
        original = _first(inner, length) if nested else _first(top_level, inner, length)
        if original is not None:
            rope["original_max_position_embeddings"] = original
    has_alpha = kind == "dynamic" and given.get("alpha")  # Hunyuan has alpha instead of factor
    needed = [] if has_alpha else [*REQUIRED.get(kind, ())]
    if kind == "proportional" and "factor" in rope:
        needed.append("factor")
    nullable = kind == "yarn"  # a null factor means the ratio of maximum and original length
    if lacking := [name for name in needed if name not in rope or not (nullable or rope[name])]:
        raise ValueError(f"rope_parameters of type {kind} lack {' and '.join(lacking)}")
    return rope


def _partial_rotary_factor(config: Mapping[str, Any], model_type: str) -> float | None:
    """``partial_rotary_factor`` at the top level, or, for MiniMax, computed from ``rotary_dim``; None if absent."""
    if (factor := config.get("partial_rotary_factor")) is not None:
        return float(factor)
    if model_type == "minimax_m2" and config.get("rotary_dim"):
        return int(config["rotary_dim"]) / int(config["head_dim"])
    return None


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of the layers with full attention."""
    rope: dict[str, Any] = with_rope_parameters(config, None)["rope_parameters"]
    if nested := [name for name in KINDS if isinstance(rope.get(name), Mapping)]:
        return dict(rope[nested[0]])
    return rope


def local_rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """``rope_parameters`` of the layers with a sliding window; None if all layers have the same parameters."""
    rope = with_rope_parameters(config, None)["rope_parameters"]
    return dict(rope[SLIDING]) if isinstance(rope.get(SLIDING), Mapping) else None


def max_model_len_of_config(config: Mapping[str, Any]) -> int:
    """Maximum sequence length of a model in tokens."""
    longest = int(config.get("max_position_embeddings") or 2048)
    if local_rope_parameters_of(config) is not None:  # max_position_embeddings is the extended length
        return longest
    return max_model_len_of(longest, rope_parameters_of(config))


def max_model_len_of(max_position_embeddings: int, rope_parameters: Mapping[str, Any]) -> int:
    """Maximum sequence length of a model in tokens. ``max_position_embeddings`` is the extended length for ``llama3``,
    and the original length for the other types."""
    match rope_parameters["rope_type"]:
        case "linear" | "dynamic":
            return int(max_position_embeddings * rope_parameters["factor"])
        case "yarn" if rope_parameters.get("factor"):
            trained = rope_parameters.get("original_max_position_embeddings", max_position_embeddings)
            return int(trained * rope_parameters["factor"])
        case _:
            return max_position_embeddings


def check_rope_type(kind: str) -> None:
    """Raise ``PenstockError`` (``unsupported``) for an unknown ``rope_type``."""
    if kind not in TYPES:
        message = f"rope_type {kind[:40]!r} is not supported; supported are {', '.join(TYPES)}"
        raise PenstockError(Code.UNSUPPORTED, message, "rope_type")
