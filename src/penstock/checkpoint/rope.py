"""Rotary positions of a ``config.json``: one reader of all spellings, with the precedence of transformers.

``rope_parameters`` is the object of transformers 5, also by kind of layer; ``rope_scaling``, ``rope_theta`` and
``partial_rotary_factor`` are those of transformers 4, and ``type`` the older name of ``rope_type``. A file may have any
of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError

from .config_defaults import ConfigClass

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)
"""Kinds of layers, by which ``rope_parameters`` may have an object for each."""
DEFAULT_BASE = 10_000.0
"""``rope_theta`` of classes that are not known."""
BASES = {
    "gemma3_text": {FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
    "modernbert": {FULL: "global_rope_theta", SLIDING: "local_rope_theta"},
    "olmo3": {FULL: "rope_theta", SLIDING: ""},
}
"""Names of the bases outside the object, of classes whose object is by kind of layer; empty for none."""
SCALED = {"modernbert": (FULL, SLIDING)}
"""Kinds of layers that ``rope_scaling`` of those classes extends, where it is not ``FULL`` alone."""
REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Parameters that a type cannot do without."""
TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "frequency_factors")
"""Types that are computed (``layers/rope.py``)."""
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
"""Types that read ``original_max_position_embeddings``."""
MROPE_DEFAULT = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "ernie4_5_vl_moe_text")
"""``model_type`` of classes for which the type ``mrope`` of older files is ``default`` with sections."""
LONGROPE_NAMES = ("su", "yarn")
"""Names that early files of Phi-3 have for ``longrope``."""


def with_rope_parameters(config: Mapping[str, Any], known: ConfigClass | None) -> dict[str, Any]:
    """A configuration with complete ``rope_parameters`` (``rope_type``, ``rope_theta``, and what the type reads) in
    place of all other spellings; by kind of layer where the class has these.

    Raises ``ValueError`` where the type is not a text, or lacks a parameter.
    """
    rest = {name: value for name, value in config.items() if name != "rope_scaling"}
    if known is not None and isinstance(base := (known.rope or {}).get("rope_theta"), Mapping):
        return rest | {"rope_parameters": _by_kind(config, known.model_type, base)}
    defaults = (known.rope if known else None) or {}
    given = config.get("rope_scaling") or config.get("rope_parameters") or defaults.get("rope_parameters") or {}
    nested = [name for name in KINDS if isinstance(given.get(name), Mapping)]
    if known is not None and nested:
        raise ValueError(f"rope_parameters are by kind of layer ({nested[0]}), which {known.model_type} does not have")
    kind = known.model_type if known else ""
    if nested:
        rope: dict[str, Any] = {name: _complete(given[name], config, defaults, kind, nested=True) for name in nested}
    else:
        rope = _complete(given, config, defaults, kind)
    return rest | {"rope_parameters": rope}


def _by_kind(config: Mapping[str, Any], model_type: str, bases: Mapping[str, float]) -> dict[str, Any]:
    """``rope_parameters`` of a class that has an object for each kind of layer, also from a file without these."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if given and scaling and not all(given.get(kind) for kind in bases):
        raise ValueError(f"rope_scaling is beside rope_parameters without {' and '.join(bases)}")
    result = {}
    for kind, default in bases.items():
        own = dict(given.get(kind) or {"rope_type": "default"})
        if kind in SCALED.get(model_type, (FULL,)):
            own |= scaling
        name = BASES[model_type][kind]
        base = config.get(name) if name else None
        own["rope_theta"] = _first(own.get("rope_theta"), base, default)
        result[kind] = _complete(own, {**config, "rope_theta": None}, {}, model_type, nested=True)
    return result


def _complete(
    given: Mapping[str, Any],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    model_type: str,
    nested: bool = False,
) -> dict[str, Any]:
    """One object of rotary positions, with what is beside it and by default.

    Args:
        nested: it is that of a kind of layer, which has the trained length within it.
    """
    rope = {name: value for name, value in given.items() if name != "type"}
    kind = _first(given.get("rope_type"), given.get("type"), "default")
    if not isinstance(kind, str):
        raise ValueError(f"rope_type is {kind!r:.40}")
    if kind == "mrope" and model_type in MROPE_DEFAULT:
        kind = "default"
    if kind in LONGROPE_NAMES and model_type == "phi3":
        kind = "longrope"
    rope["rope_type"] = kind
    base = _first(given.get("rope_theta"), config.get("rope_theta"), defaults.get("rope_theta"), DEFAULT_BASE)
    rope["rope_theta"] = base if isinstance(base, list) else float(base)
    beside = _partial(config, model_type)
    share = _first(given.get("partial_rotary_factor"), beside, defaults.get("partial_rotary_factor"))
    if share is not None:
        rope["partial_rotary_factor"] = float(share)
    if kind in WITH_ORIGINAL:
        length, beside = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
        within = given.get("original_max_position_embeddings")
        original = _first(within, length) if nested else _first(beside, within, length)
        if original is not None:
            rope["original_max_position_embeddings"] = original
    stretched = kind == "dynamic" and given.get("alpha")  # of Hunyuan, in place of a factor
    needed = [] if stretched else [*REQUIRED.get(kind, ())]
    if kind == "proportional" and "factor" in rope:
        needed.append("factor")
    nullable = kind == "yarn"  # whose factor is then the ratio of the lengths
    if lacking := [name for name in needed if name not in rope or not (nullable or rope[name])]:
        raise ValueError(f"rope_parameters of the type {kind} lack {' and '.join(lacking)}")
    return rope


def _partial(config: Mapping[str, Any], model_type: str) -> float | None:
    """``partial_rotary_factor`` beside the object; MiniMax's files have ``rotary_dim``."""
    if (share := config.get("partial_rotary_factor")) is not None:
        return float(share)
    if model_type == "minimax_m2" and config.get("rotary_dim"):
        return int(config["rotary_dim"]) / int(config["head_dim"])
    return None


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


def rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of the layers that see everything."""
    rope: dict[str, Any] = with_rope_parameters(config, None)["rope_parameters"]
    if nested := [name for name in KINDS if isinstance(rope.get(name), Mapping)]:
        return dict(rope[nested[0]])
    return rope


def local_rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """``rope_parameters`` of layers with a sliding window, where these have others; None where they have not."""
    rope = with_rope_parameters(config, None)["rope_parameters"]
    return dict(rope[SLIDING]) if isinstance(rope.get(SLIDING), Mapping) else None


def max_model_len_of_config(config: Mapping[str, Any]) -> int:
    """Longest sequence that a model is good for."""
    longest = int(config.get("max_position_embeddings") or 2048)
    if local_rope_parameters_of(config) is not None:  # whose length is the extended one
        return longest
    return max_model_len_of(longest, rope_parameters_of(config))


def max_model_len_of(max_position_embeddings: int, rope_parameters: Mapping[str, Any]) -> int:
    """Longest sequence that a model is good for. ``max_position_embeddings`` is the extended length in ``llama3``
    checkpoints, and the trained one in others."""
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
        raise PenstockError(Code.UNSUPPORTED, f"rope type {kind[:40]!r}; known are {', '.join(TYPES)}", "rope_type")
