"""Reader of a checkpoint's ``config.json``, for the engine and ``penstock plan``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file

from .composite_config import complete_config
from .config_bounds import out_of_bounds
from .speech import with_decoder_fields
from .stored_tensors import stored_dtype, stored_head

CONFIG = "config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")
"""Files of AutoGPTQ and AutoAWQ with the ``quantization_config`` that ``config.json`` lacks."""
MODELOPT_FILE = "hf_quant_config.json"
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed")
"""Values of ``quant_method`` of NVIDIA Model Optimizer."""
"""File of NVIDIA Model Optimizer with the quantization that ``config.json`` lacks."""


def read_config_json(folder: Path, weights: bool = True) -> dict[str, Any]:
    """The complete configuration of a checkpoint: ``config.json`` with the defaults of its class, uniform rotary
    parameters (``checkpoint/rope.py``), and values read from the weights.

    Args:
        weights: read ``dtype`` and ``tie_word_embeddings`` from the weights. API processes need neither.

    Raises ``PenstockError`` (``invalid``) if the file is absent or broken.
    """
    given, path = read_plain_config_json(folder), folder / CONFIG
    try:
        complete = with_decoder_fields(complete_config(given))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has an invalid value: {error}") from error
    return _with_stored(complete, given, folder) if weights else complete


def read_plain_config_json(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint without completion, but with the ``quantization_config`` of other files. Raises
    ``PenstockError`` (``invalid``) if the file is absent, broken, or out of bounds (``config_bounds.py``)."""
    path = folder / CONFIG
    if not path.exists():
        raise invalid("model", f"{folder} has no {CONFIG}: name a folder with a Hugging Face checkpoint")
    result = _read_object(path)
    given = result.get("quantization_config")
    if not given and not result.get("compression_config"):
        result |= _quantization_of_side_file(folder)
    elif isinstance(given, Mapping) and given.get("quant_method") in MODELOPT:
        result["quantization_config"] = _modelopt(given, path)
    try:
        message = next(out_of_bounds(result), "")
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has an invalid value: {error}") from error
    if message:
        raise invalid("model", f"{path}: {message}")
    return result


def _with_stored(config: dict[str, Any], given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Complete ``dtype`` and ``tie_word_embeddings`` from the weights. ``dtype`` is read if absent. Embeddings are not
    tied if the files have both matrices and these differ, as in transformers; they are tied if the field is absent and
    the files have no language model head."""
    if config.get("gguf"):
        return config
    named = [config[name] for name in ("dtype", "torch_dtype") if config.get(name) not in (None, "auto")]
    kept = {name: value for name, value in config.items() if name != "torch_dtype"}
    config = {**kept, "dtype": named[0] if named else stored_dtype(folder)}
    tied = config.get("tie_word_embeddings")
    if tied and stored_head(folder) == "other":
        return {**config, "tie_word_embeddings": False}
    if not tied and given.get("tie_word_embeddings") is None and stored_head(folder) == "absent":
        return {**config, "tie_word_embeddings": True}
    return config


def _quantization_of_side_file(folder: Path) -> dict[str, Any]:
    """``quantization_config`` from the first file that describes the quantization; empty without such a file."""
    for name in QUANTIZATION_FILES:
        if not (folder / name).is_file():
            continue
        found = _read_object(folder / name)
        is_awq = name == QUANTIZATION_FILES[1] or "w_bit" in found or "zero_point" in found
        return {"quantization_config": {"quant_method": "awq" if is_awq else "gptq", **found}}
    path = folder / MODELOPT_FILE
    described = _read_object(path).get("quantization") if path.is_file() else None
    if isinstance(described, Mapping) and described.get("quant_algo"):
        return {"quantization_config": _modelopt(described, path)}
    return {}


def _modelopt(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint of NVIDIA Model Optimizer in fp8 or NVFP4, whose quantized matrices have
    a ``weight_scale``. Raises ``PenstockError`` (``unsupported``) for another algorithm."""
    if (algorithm := found.get("quant_algo")) in ("NVFP4", "MIXED_PRECISION"):
        return {"quant_method": "modelopt_fp4"}
    if algorithm != "FP8":
        message = f"{path}: quant_algo {algorithm!r:.60} of Model Optimizer is not supported"
        raise PenstockError(Code.UNSUPPORTED, f"{message}; use an FP8 or NVFP4 checkpoint", "model")
    return {"quant_method": "fp8", "activation_scheme": "static"}


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ``PenstockError`` (``invalid``) for an unreadable file or another value."""
    result = read_json_file(path)
    if not isinstance(result, dict):
        raise invalid("model", f"{path} is not a JSON object (found: {type(result).__name__})")
    return result
