"""Reads a checkpoint's ``config.json``: the one place where the engine and ``penstock plan`` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file

from .composite_config import merge_text_config
from .config_bounds import out_of_bounds
from .speech import with_decoder_fields

CONFIG = "config.json"


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in a checkpoint's ``config.json``. Raises ``PenstockError`` (``invalid``) where there is none, or a
    number in it is out of bounds (``config_bounds.py``)."""
    path = folder / CONFIG
    if not path.exists():
        raise invalid("model", f"{folder} has no {CONFIG}: name a folder with a Hugging Face checkpoint")
    result = read_json_file(path)
    if not isinstance(result, dict):
        raise invalid("model", f"{path} does not hold an object")
    try:
        sentence = next(out_of_bounds(result), "")
        merged = with_decoder_fields(merge_text_config(result))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has a value of the wrong kind: {error}") from error
    if sentence:
        raise invalid("model", f"{path}: {sentence}")
    return merged
