"""The files of sentence-transformers: ``modules.json`` and what it names."""

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
"""Ends of names of a module's files: its configuration and weights."""
TRANSFORMER = "Transformer"
KNOWN = (TRANSFORMER, "Pooling", "Normalize", "Dense")
FUNCTIONS = {
    "Identity": "",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Classes of ``torch.nn`` that ``Dense`` names as its activation → ``ops.activations.ACTIVATIONS``; empty for none."""


@dataclass(frozen=True)
class Module:
    """An entry of ``modules.json``."""

    kind: str
    """The last part of its ``type``: ``Pooling``, ``Dense`` …"""
    folder: Path


@dataclass(frozen=True)
class DenseModule:
    """A linear layer after pooling."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    function: str
    """Activation function, a name of ``ops.activations.ACTIVATIONS``; empty for none."""


def read_modules(folder: Path) -> list[Module] | None:
    """The modules of a checkpoint, in their order; None where it is not of sentence-transformers.

    Args:
        folder: the model's, or that of its Transformer.

    Raises ``PenstockError``: ``invalid`` where the file is broken, ``unsupported`` for a module that is not known.
    """
    folder = model_folder(folder)
    if (modules := _listed_modules(folder)) is None:
        return None
    path = folder / MODULES
    for module in modules:
        if module.kind not in KNOWN:
            raise PenstockError(Code.UNSUPPORTED, f"{path} has a module {module.kind}", "pooling_type")
        if not module.folder.resolve().is_relative_to(folder.resolve()):
            raise invalid("model", f"{path} names {module.folder}, which is outside the model")
    return modules


def transformer_folder(folder: Path) -> Path:
    """The folder of a model's Transformer, which older checkpoints have in ``0_Transformer``; ``folder`` itself where
    ``modules.json`` names no other one."""
    found = (module.folder for module in _listed_modules(folder) or () if module.kind == TRANSFORMER)
    inner = next(found, folder)
    is_inside = inner.resolve().is_relative_to(folder.resolve())
    return inner if is_inside and inner != folder and (inner / "config.json").is_file() else folder


def model_folder(folder: Path) -> Path:
    """The folder with ``modules.json``: the parent of a Transformer's folder, ``folder`` itself of other models."""
    parent = folder.parent
    return parent if (parent / MODULES).is_file() and transformer_folder(parent) == folder else folder


def module_files(folder: Path) -> dict[Path, bytes]:
    """Files for a copy of a checkpoint of sentence-transformers, by their paths in it, except those of its Transformer,
    which the copy has at the top.

    Args:
        folder: as of ``read_modules``.

    Raises ``PenstockError`` (``invalid``) where ``modules.json`` is broken.
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
    """The modules as listed; None without ``modules.json``. Raises ``PenstockError`` (``invalid``)."""
    path = folder / MODULES
    if (given := read_json(path)) is None:
        return None
    try:
        return [Module(str(entry["type"]).rpartition(".")[2], folder / str(entry["path"])) for entry in given]
    except (KeyError, TypeError) as error:
        raise invalid("model", f"{path} does not list modules by type and path") from error


def read_dense_modules(folder: Path) -> list[DenseModule]:
    """The linear layers after pooling, in their order. Raises ``PenstockError`` as ``read_modules``."""
    return [_dense(module.folder) for module in read_modules(folder) or () if module.kind == "Dense"]


def _dense(folder: Path) -> DenseModule:
    config = read_object(folder / "config.json")
    function = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if function not in FUNCTIONS:
        raise PenstockError(Code.UNSUPPORTED, f"{folder} has the activation {function}", "model")
    try:
        inputs, outputs = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise invalid("model", f"{folder / 'config.json'} does not give in_features and out_features") from error
    return DenseModule(folder, inputs, outputs, config.get("bias") is not False, FUNCTIONS[function])


def max_seq_length(folder: Path) -> int | None:
    """Longest text that an encoder was made for, in tokens, of ``sentence_bert_config.json`` and
    ``tokenizer_config.json``; None where neither says."""
    given = (
        read_object(folder / "sentence_bert_config.json").get("max_seq_length"),
        read_object(folder / "tokenizer_config.json").get("model_max_length"),
    )
    return min([length for length in given if isinstance(length, int) and length > 0], default=None)


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON object; empty where the file is missing. Raises ``PenstockError`` (``invalid``) where it is none."""
    result = read_json(path)
    if result is None:
        return {}
    if not isinstance(result, dict):
        raise invalid("model", f"{path} does not hold an object")
    return result


def read_json(path: Path) -> Any:
    """A JSON document; None where the file is missing. Raises ``PenstockError`` (``invalid``) where it is none."""
    return read_json_file(path) if path.exists() else None
