"""Reads a checkpoint's ``config.json``: the one place where the engine and ``penstock plan`` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid

from .composite_config import merge_text_config
from .config_bounds import out_of_bounds
from .speech import with_decoder_fields

CONFIG = "config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")
"""Files of AutoGPTQ and AutoAWQ, which describe the quantization where ``config.json`` does not."""


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in a checkpoint's ``config.json``. Raises ``PenstockError`` (``invalid``) where there is none, or a
    number in it is out of bounds (``config_bounds.py``)."""
    path = folder / CONFIG
    try:
        result = _read_object(path)
    except OSError as error:
        raise invalid("model", f"{folder} has no {CONFIG}: name a folder with a Hugging Face checkpoint") from error
    if not result.get("quantization_config") and not result.get("compression_config"):
        result |= _quantization_of_side_file(folder)
    try:
        sentence = next(out_of_bounds(result), "")
        merged = with_decoder_fields(merge_text_config(result))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has a value of the wrong kind: {error}") from error
    if sentence:
        raise invalid("model", f"{path}: {sentence}")
    return merged


def _quantization_of_side_file(folder: Path) -> dict[str, Any]:
    """``quantization_config`` from the first file that describes the quantization; empty without any."""
    for name in QUANTIZATION_FILES:
        if not (folder / name).is_file():
            continue
        found = _read_object(folder / name)
        is_awq = name == QUANTIZATION_FILES[1] or "w_bit" in found or "zero_point" in found
        return {"quantization_config": {"quant_method": "awq" if is_awq else "gptq", **found}}
    return {}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``OSError``, and ``PenstockError`` (``invalid``) where the file does not hold one."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid("model", f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise invalid("model", f"{path} does not hold an object")
    return result
