"""Reads a checkpoint's ``config.json``: the one place where the engine and ``penstock plan`` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid

CONFIG = "config.json"


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in a checkpoint's ``config.json``. Raises ``PenstockError`` (``invalid``) where there is none."""
    path = folder / CONFIG
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid("model", f"{folder} has no {CONFIG}: name a folder with a Hugging Face checkpoint") from error
    except (ValueError, RecursionError) as error:
        raise invalid("model", f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise invalid("model", f"{path} does not hold an object")
    if isinstance(text := result.get("text_config"), dict):  # of a model that sees images, where transformers wrote it
        fields = {name: value for name, value in text.items() if value is not None and name != "model_type"}
        result = {
            **fields,
            **result,
            "tie_word_embeddings": bool(result.get("tie_word_embeddings") or fields.get("tie_word_embeddings")),
        }
    return result
