"""Reads JSON files; errors are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import invalid


def read_text_file(path: Path, field: str = "model") -> str:
    """The text of a file. Raises ``PenstockError`` (``invalid``) where it cannot be read, or is not UTF-8.

    Args:
        field: the option that names the file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise invalid(field, f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise invalid(field, f"{path} is damaged: byte {error.start} is not UTF-8; fetch it again") from error
    except ValueError as error:  # a name with a zero byte
        raise invalid(field, f"{path} cannot be read: {error}") from error


def read_json_file(path: Path, field: str = "model") -> Any:
    """The JSON document in a file. Raises as ``read_text_file``, and where it is not JSON."""
    text = read_text_file(path, field)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{path} is not JSON: {error}") from error
