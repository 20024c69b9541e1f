"""Reading of text and JSON files, with errors for users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import invalid


def read_text_file(path: Path, field: str = "model") -> str:
    """Read a UTF-8 file. Raises ``PenstockError`` (``invalid``) if it cannot be read, or is not UTF-8.

    Args:
        field: name of the option with the file's path, for errors.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise invalid(field, f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise invalid(field, f"{path} is damaged: byte {error.start} is not UTF-8; download it again") from error
    except ValueError as error:  # the path contains a zero byte
        raise invalid(field, f"{path} cannot be read: {error}") from error


def read_json_file(path: Path, field: str = "model") -> Any:
    """Parse a JSON file. Raises ``PenstockError`` (``invalid``) if it cannot be read, or is not JSON in UTF-8."""
    text = read_text_file(path, field)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{path} is not JSON: {error}") from error
