"""A checkpoint's pooling, from the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.core import Code, PenstockError, PoolingParams
from penstock.core.errors import invalid

MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
POOLING_TYPES = {"last": "last", "lasttoken": "last", "mean": "mean"}
"""Values of ``pooling_mode`` in newer files."""
FIELD = "pooling_type"
KNOWN = ("Transformer", "Pooling", "Normalize")


def read_pooling(folder: Path, pooling_type: str = "auto") -> PoolingParams:
    """The pooling of a checkpoint; by default the last token's hidden state, normalized.

    Args:
        pooling_type: ``last`` or ``mean`` to override the files.

    Raises ``PenstockError``: ``invalid`` where a file is broken, ``unsupported`` where it asks for another pooling.
    """
    modules = _read(folder / "modules.json")
    if modules is None:
        return PoolingParams(pooling_type="mean" if pooling_type == "mean" else "last")
    try:
        kinds = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (KeyError, TypeError) as error:
        raise invalid("model", f"{folder / 'modules.json'} does not list modules by type and path") from error
    if unknown := [kind for kind, _ in kinds if kind not in KNOWN]:
        raise PenstockError(Code.UNSUPPORTED, f"{folder / 'modules.json'} has a module {unknown[0]}", FIELD)
    if pooling_type == "auto":
        pooling_type = next((_mode(folder / path) for kind, path in kinds if kind == "Pooling"), "last")
    normalize = any(kind == "Normalize" for kind, _ in kinds)
    return PoolingParams(pooling_type="mean" if pooling_type == "mean" else "last", normalize=normalize)


def _mode(folder: Path) -> str:
    config = _read(folder / "config.json")
    if not isinstance(config, dict):
        raise invalid("model", f"{folder} has no config.json that says how it pools")
    names = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    newer = config.get("pooling_mode")
    if isinstance(newer, str) and newer in POOLING_TYPES:
        return POOLING_TYPES[newer]
    if newer is not None or len(names) != 1 or names[0] not in MODES:
        message = (
            f"{folder} asks for pooling by {newer or ', '.join(names) or 'nothing'}; last token and mean are supported"
        )
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    return MODES[names[0]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise invalid("model", f"{path} is not JSON: {error}") from error
