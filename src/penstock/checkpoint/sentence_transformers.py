"""Files of sentence-transformers checkpoints: ``modules.json`` and the modules that it lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
COPIED = (".json", ".safetensors", ".bin")
"""Suffixes of a module's configuration and weight files."""
TRANSFORMER = "Transformer"
KNOWN = (TRANSFORMER, "Pooling", "Normalize", "Dense")
FUNCTIONS = {
    "Identity": "",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Activation class (``torch.nn``) of ``Dense`` → key of ``ops.activations.ACTIVATIONS``; empty: no activation."""


@dataclass(frozen=True)
class Module:
    """An entry of ``modules.json``."""

    kind: str
    """Last part of ``type``: ``Pooling``, ``Dense`` …"""
    folder: Path


@dataclass(frozen=True)
class DenseModule:
    """A linear layer after pooling."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    function: str
    """Activation: a key of ``ops.activations.ACTIVATIONS``; empty: no activation."""


def read_modules(folder: Path) -> list[Module] | None:
    """The modules of a checkpoint in order; None without ``modules.json``.

    Args:
        folder: folder of the model, or of its Transformer module.

    Raises ``PenstockError``: ``invalid`` for a broken file, ``unsupported`` for an unknown module.
    """
    folder = model_folder(folder)
    if (modules := _listed_modules(folder)) is None:
        return None
    path = folder / MODULES
    for module in modules:
        if module.kind not in KNOWN:
            message = f"{path} has module {module.kind}, which is not supported; supported: {', '.join(KNOWN)}"
            raise PenstockError(Code.UNSUPPORTED, message, "pooling_type")
        if not module.folder.resolve().is_relative_to(folder.resolve()):
            raise invalid("model", f"{path} names {module.folder}; it must be a folder inside {folder}")
    return modules


def transformer_folder(folder: Path) -> Path:
    """Folder of a model's Transformer module, e.g. ``0_Transformer`` in older checkpoints; ``folder`` itself by
    default."""
    found = (module.folder for module in _listed_modules(folder) or () if module.kind == TRANSFORMER)
    inner = next(found, folder)
    is_inside = inner.resolve().is_relative_to(folder.resolve())
    return inner if is_inside and inner != folder and (inner / "config.json").is_file() else folder


def model_folder(folder: Path) -> Path:
    """Folder with ``modules.json``: the parent of a Transformer module's folder, else ``folder`` itself."""
    parent = folder.parent
    return parent if (parent / MODULES).is_file() and transformer_folder(parent) == folder else folder


def module_files(folder: Path) -> dict[Path, bytes]:
    """Contents of the files to copy from a sentence-transformers checkpoint, by relative path. Files of the Transformer
    module are not included: the caller writes them to the top level of the copy.

    Args:
        folder: see ``read_modules``.

    Raises ``PenstockError`` (``invalid``) if ``modules.json`` is broken.
    """
    folder = model_folder(folder)
    files: dict[Path, bytes] = {}
    entries: list[Any] = []
    for module, entry in zip(_listed_modules(folder) or (), read_json(folder / MODULES) or (), strict=True):
        if module.kind == TRANSFORMER:
            entries.append({**entry, "path": ""})
            continue
        entries.append(entry)
        if module.folder != folder and module.folder.resolve().is_relative_to(folder.resolve()):
            kept = sorted(path for path in module.folder.glob("*") if path.suffix in COPIED and path.is_file())
            files |= {path.relative_to(folder): path.read_bytes() for path in kept}
    if entries:
        files[Path(MODULES)] = json.dumps(entries, indent=2).encode()
        if (path := folder / PROMPTS).is_file():
            files[Path(PROMPTS)] = path.read_bytes()
    return files


def _listed_modules(folder: Path) -> list[Module] | None:
    """All modules in ``modules.json``, unchecked; None if it is missing. A broken file raises ``PenstockError``."""
    path = folder / MODULES
    if (given := read_json(path)) is None:
        return None
    try:
        return [Module(str(entry["type"]).rpartition(".")[2], folder / str(entry["path"])) for entry in given]
    except (KeyError, TypeError) as error:
        raise invalid("model", f"{path} must be a list of objects with type and path; got {given!r:.60}") from error


def read_dense_modules(folder: Path) -> list[DenseModule]:
    """The linear layers after pooling, in order. Raises the errors of ``read_modules``; also ``PenstockError``:
    ``invalid`` for missing sizes, ``unsupported`` for an unknown activation."""
    return [_dense(module.folder) for module in read_modules(folder) or () if module.kind == "Dense"]


def _dense(folder: Path) -> DenseModule:
    config = read_object(folder / "config.json")
    function = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if function not in FUNCTIONS:
        message = f"{folder} has activation {function}, which is not supported; supported: {', '.join(FUNCTIONS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    try:
        inputs, outputs = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise invalid("model", f"{folder / 'config.json'} must have integers in_features and out_features") from error
    return DenseModule(folder, inputs, outputs, config.get("bias") is not False, FUNCTIONS[function])


def max_seq_length(folder: Path) -> int | None:
    """Maximum number of tokens: the smaller of ``max_seq_length`` in ``sentence_bert_config.json`` and
    ``model_max_length`` in ``tokenizer_config.json``; None if both are absent."""
    given = (
        read_object(folder / "sentence_bert_config.json").get("max_seq_length"),
        read_object(folder / "tokenizer_config.json").get("model_max_length"),
    )
    return min([length for length in given if isinstance(length, int) and length > 0], default=None)


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty if the file is missing. Raises ``PenstockError`` (``invalid``) for a broken file
    or another JSON value."""
    result = read_json(path)
    if result is None:
        return {}
    if not isinstance(result, dict):
        raise invalid("model", f"{path} is not a JSON object (found: {type(result).__name__})")
    return result


def read_json(path: Path) -> Any:
    """The JSON value in a file; None if the file is missing. Raises ``PenstockError`` (``invalid``) for broken JSON."""
    return read_json_file(path) if path.exists() else None
