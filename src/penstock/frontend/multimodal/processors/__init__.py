"""Image processors, one module per family, by the architecture in ``config.json``."""

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
    """By architecture: ``READERS`` of each module of this package."""
    readers: dict[str, Reader] = {}
    for module in iter_modules(__path__):
        readers |= import_module(f"{__name__}.{module.name}").READERS
    return readers


def read_image_processor(
    folder: Path, kwargs: Mapping[str, Any], limit: int, token_id: Callable[[str], int | None]
) -> ImageProcessor | None:
    """The processor of a checkpoint; None of a model that sees no images.

    Args:
        kwargs: ``mm_processor_kwargs``.
        token_id: the id of a token by its name.
        limit: pixels of an image, at most.

    Raises ``PenstockError``: ``invalid`` where a file is broken, ``unsupported`` for another kind of processor.
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
        raise invalid("model", f"{folder} has a broken {CONFIG} or image processor: {error}") from error


def _read(folder: Path) -> dict[str, Any]:
    """The image processor's configuration: ``image_processor`` in the file of all processors, or else its separate
    file; empty without both."""
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
            raise invalid("model", f"{folder / name} is broken: {error}") from error
    return result
