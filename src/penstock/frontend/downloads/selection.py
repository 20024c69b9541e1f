"""Which files of a model are needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.core.errors import invalid

from .remote import RemoteFile

SMALL = ("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "*.tiktoken", "*.txt", "[1-9]_*/*")
"""Configuration, tokenizer, chat templates and small modules. Code is never downloaded."""
WEIGHTS = (("*.safetensors",), ("pytorch_model*.bin", "0_*/pytorch_model*.bin"))
"""Weights, in order of preference: of several kinds of the same weights one is enough."""
UNNEEDED = ("*/*", "consolidated*", "*.onnx.json", "training_args.bin")
"""The same weights for other programs."""
NEEDED = ("[0-9]_*/*", "additional_chat_templates/*.jinja")
"""Files in folders that are needed nevertheless: of modules of sentence-transformers, and chat templates."""
NO_GGUF_MODEL = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
"""GGUF files beside a model's: projectors of images, importance matrices."""
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)
QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32|FP16))(?=[-.])", re.IGNORECASE
)


@dataclass(frozen=True)
class Selection:
    """What to fetch.

    Args:
        include: patterns of paths; nothing for what a checkpoint needs.
        exclude: patterns of paths that are not fetched.
        quantization: of the GGUF file that is fetched in place of a checkpoint.
        weights: whether weights are needed.
        weight_filter: of the weight files by path, those that are needed; None for all.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    quantization: str = ""
    weights: bool = True
    weight_filter: Callable[[str], bool] | None = None

    def of(self, files: Sequence[RemoteFile], source: str) -> list[RemoteFile]:
        """The selected ones of a model's files.

        Raises ``PenstockError`` (``invalid``) where there is no such quantization, where there are GGUF files only and
        none is chosen, and for patterns that match nothing.
        """
        if self.quantization:
            return gguf_files(files, self.quantization, source)
        if self.include:
            chosen = [file for file in files if _matches(file.path, self.include)]
        else:
            chosen = self._checkpoint(files, source)
        chosen = [file for file in chosen if not _matches(file.path, self.exclude)]
        if not chosen:
            words = f"none of the {len(files)} files of {source} is wanted"
            raise invalid("model", f"{words}: check that it is a checkpoint, and --include and --exclude")
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
    how = f"add a quantization to the name, as in org/name:{names[0]}, or give the URI of one file"
    raise invalid("model", f"{source} has GGUF files only ({', '.join(names)}): {how}")


def gguf_files(files: Sequence[RemoteFile], quantization: str, source: str) -> list[RemoteFile]:
    """The GGUF file of a quantization, or all parts of it in their order.

    Of several models in one repository, such as ``x-Q4_K_M.gguf`` and ``x-UD-Q4_K_M.gguf``, the shortest name is taken.

    Raises ``PenstockError`` (``invalid``) where there is none.
    """
    token = re.compile(rf"(^|[-._/]){re.escape(quantization)}(?=[-.])", re.IGNORECASE)
    models = {name: parts for name, parts in _gguf_models(files).items() if token.search(name + ".gguf")}
    if not models:
        known = ", ".join(quantizations(files)) or "no GGUF files"
        raise invalid("model", f"{source} has no GGUF file of the quantization {quantization}; it has {known}")
    parts = models[min(models, key=lambda name: (len(name), name))]
    if (shard := SHARD.search(parts[0].path)) and len(parts) != int(shard[2]):
        raise invalid("model", f"{source} has {len(parts)} of the {int(shard[2])} parts of {parts[0].path}")
    return parts


def quantizations(files: Sequence[RemoteFile]) -> list[str]:
    """The quantizations of GGUF files, as their names have them."""
    found = (QUANTIZATION.search(f"{name.rpartition('/')[2]}.gguf") for name in _gguf_models(files))
    return sorted({match[1] for match in found if match})


def _gguf_models(files: Sequence[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """The files of each GGUF model, by its path without suffix and number of the part."""
    models: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and not NO_GGUF_MODEL.search(file.path):
            models.setdefault(SHARD.sub("", file.path).removesuffix(".gguf"), []).append(file)
    return models


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """As hubs' own tools match: ``*`` includes ``/``, and a folder's name with ``/`` is all that is in it."""
    return any(fnmatchcase(path, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)
