"""Image processors of model families, one module per family, chosen by the architecture in ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.core.errors import invalid

from ..prompts import ImageProcessor, ProcessorFiles, Reader

FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_CONFIG = "tokenizer_config.json"


@cache
def _readers() -> dict[str, Reader]:
    """Readers by architecture, from ``READERS`` of the modules of this package."""
    readers: dict[str, Reader] = {}
    for module in iter_modules(__path__):
        readers |= import_module(f"{__name__}.{module.name}").READERS
    return readers


def read_image_processor(
    folder: Path, kwargs: Mapping[str, Any], limit: int, token_id: Callable[[str], int | None]
) -> ImageProcessor | None:
    """Read the image processor of a checkpoint; None for a model without images.

    Args:
        kwargs: ``mm_processor_kwargs``.
        limit: maximum number of pixels of an image.
        token_id: returns the id of a token, given its text; None: no such token.

    Raises ``PenstockError``: ``invalid`` if a file is malformed, ``unsupported`` for another kind of processor.
    """
    if not (folder / CONFIG).is_file():
        return None
    config = read_config_json(folder, weights=False)
    if not (reader := _readers().get(next(iter(config.get("architectures") or [""])))):
        return None
    path = folder / TOKENIZER_CONFIG
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        files = ProcessorFiles(folder, config, _read(folder), tokenizer, token_id, limit)
        return reader(files).with_kwargs(kwargs)
    except (KeyError, AttributeError, TypeError, ValueError, RecursionError, OSError) as error:
        raise invalid("model", f"{CONFIG} or the image processor of {folder} is invalid: {error}") from error


def _read(folder: Path) -> dict[str, Any]:
    """Configuration of the image processor: ``image_processor`` of ``processor_config.json``, otherwise the content of
    ``preprocessor_config.json``; empty if both are absent."""
    result: dict[str, Any] = {}
    for name in FILES:
        if not (folder / name).is_file():
            continue
        try:
            given = json.loads((folder / name).read_text(encoding="utf-8"))
            if "image_processor" in given:
                return dict(given["image_processor"])
            result = dict(given)
        except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
            raise invalid("model", f"{folder / name} is malformed: {error}") from error
    return result
