"""Selection of the files of a model to download."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.core.errors import invalid

from .remote import RemoteFile

SMALL = ("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "*.tiktoken", "*.txt", "[1-9]_*/*")
"""Patterns of configuration, tokenizer, chat templates and small modules. Code is never downloaded."""
WEIGHTS = (("*.safetensors",), ("pytorch_model*.bin", "0_*/pytorch_model*.bin"))
"""Patterns of weight formats in order of preference; only the first available format is downloaded."""
UNNEEDED = ("*/*", "consolidated*", "*.onnx.json", "training_args.bin")
"""Patterns of files for other programs, such as copies of the weights in subfolders."""
NEEDED = ("[0-9]_*/*", "additional_chat_templates/*.jinja")
"""Exceptions from ``UNNEEDED``: modules of sentence-transformers, and chat templates."""
AUXILIARY_GGUF = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
"""GGUF files that are not models: image projectors and importance matrices."""
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)
QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32|FP16))(?=[-.])", re.IGNORECASE
)


@dataclass(frozen=True)
class Selection:
    """Selection of files.

    Args:
        include: patterns of paths; empty: the files that a checkpoint needs.
        exclude: patterns of paths to skip.
        quantization: select the GGUF file of this quantization instead of a checkpoint.
        weights: include weights.
        weight_filter: returns True for the path of a needed weight file; None: all weight files are needed.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    quantization: str = ""
    weights: bool = True
    weight_filter: Callable[[str], bool] | None = None

    def select(self, files: Sequence[RemoteFile], source: str) -> list[RemoteFile]:
        """Select the files to download from a model's files.

        Raises ``PenstockError`` (``invalid``) if no file has the quantization, if no quantization is given and the only
        weights are several GGUF models, or if no file matches the patterns.
        """
        if self.quantization:
            return gguf_files(files, self.quantization, source)
        if self.include:
            chosen = [file for file in files if _matches(file.path, self.include)]
        else:
            chosen = self._checkpoint(files, source)
        chosen = [file for file in chosen if not _matches(file.path, self.exclude)]
        if not chosen:
            problem = f"none of the {len(files)} files of {source} is selected"
            raise invalid("model", f"{problem}: check that it is a checkpoint, and --include and --exclude")
        return chosen

    def _checkpoint(self, files: Sequence[RemoteFile], source: str) -> list[RemoteFile]:
        known = [file for file in files if _matches(file.path, NEEDED) or not _matches(file.path, UNNEEDED)]
        chosen = [file for file in known if _matches(file.path, SMALL)]
        if not self.weights:
            return chosen
        kinds = ([file for file in known if _matches(file.path, kind)] for kind in WEIGHTS)
        weights = next((found for found in kinds if found), [])
        if not weights and (models := _gguf_models(files)):
            return _only_gguf_model(models, files, source)
        if self.weight_filter:
            weights = [file for file in weights if self.weight_filter(file.path)]
        return chosen + weights


def _only_gguf_model(models: dict[str, list[RemoteFile]], files: Sequence[RemoteFile], source: str) -> list[RemoteFile]:
    if len(models) == 1:
        return next(iter(models.values()))
    names = quantizations(files) or sorted(models)
    advice = f"add a quantization to the name, as in org/name:{names[0]}, or give the URI of one file"
    raise invalid("model", f"{source} has only GGUF files ({', '.join(names)}): {advice}")


def gguf_files(files: Sequence[RemoteFile], quantization: str, source: str) -> list[RemoteFile]:
    """The GGUF file of a quantization, or all its parts in order.

    If several models match, such as ``x-Q4_K_M.gguf`` and ``x-UD-Q4_K_M.gguf``, the shortest name is used.

    Raises ``PenstockError`` (``invalid``) if no file has the quantization, or parts are missing.
    """
    token = re.compile(rf"(^|[-._/]){re.escape(quantization)}(?=[-.])", re.IGNORECASE)
    models = {name: parts for name, parts in _gguf_models(files).items() if token.search(name + ".gguf")}
    if not models:
        known = ", ".join(quantizations(files)) or "no GGUF files"
        raise invalid("model", f"{source} has no GGUF file with the quantization {quantization}; it has {known}")
    parts = models[min(models, key=lambda name: (len(name), name))]
    if (shard := SHARD.search(parts[0].path)) and len(parts) != int(shard[2]):
        problem = f"{source} has {len(parts)} of the {int(shard[2])} parts of {parts[0].path}"
        raise invalid("model", f"{problem}: use another source")
    return parts


def quantizations(files: Sequence[RemoteFile]) -> list[str]:
    """Quantizations of GGUF files, from their names."""
    found = (QUANTIZATION.search(f"{name.rpartition('/')[2]}.gguf") for name in _gguf_models(files))
    return sorted({match[1] for match in found if match})


def _gguf_models(files: Sequence[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """Files of each GGUF model; key: path without suffix and part number."""
    models: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and not AUXILIARY_GGUF.search(file.path):
            models.setdefault(SHARD.sub("", file.path).removesuffix(".gguf"), []).append(file)
    return models


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Match patterns like the hubs' tools: ``*`` matches ``/``, and a pattern that ends with ``/`` matches a folder."""
    return any(fnmatchcase(path, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)
