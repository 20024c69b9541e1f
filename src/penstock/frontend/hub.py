"""Resolving a model's name to the folder of its checkpoint, with downloads from the Hugging Face hub."""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import msgspec
from tqdm import tqdm

from penstock import demo
from penstock.config.speculative import SpeculativeConfig
from penstock.core.errors import Code, PenstockError, invalid
from penstock.planning.engine_config import UNFINISHED

from .gguf_folder import checkpoint_folder, gguf_in

logger = logging.getLogger(__name__)

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tiktoken.model", "*.tiktoken", "*.txt"]
"""Files of a checkpoint. Pickles and code are never downloaded."""
IGNORE_PATTERNS = ["[!1]*/*", "1[!_]*/*", "consolidated*"]
"""Excluded: the same weights for other programs. ``1_Pooling`` (sentence-transformers) is kept."""
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
COMMIT = re.compile(r"[0-9a-f]{40}")
RETRY_DELAYS = (0, 1, 2)
"""Seconds before each retry after a connection was reset."""


def resolve(
    model: str | Path,
    *,
    revision: str = "",
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    files: Sequence[str] = ALLOW_PATTERNS,
) -> Path:
    """The folder of a checkpoint, downloaded from the hub where needed.

    Args:
        model: empty for the built-in model, a path, or a name on the hub (``org/name``). An existing path is a path,
            of a checkpoint's folder or a GGUF file, for which a folder is made (``gguf_folder``).
        revision: branch, tag or commit of a name; nothing for its main branch.
        token: opens gated and private models; None takes ``HF_TOKEN``, or the one that ``hf auth login`` stored.
        cache_dir: where fetched files are kept; None takes the cache that all programs share (``HF_HUB_CACHE``).
        progress: show progress bars while fetching.
        files: patterns of those to fetch.

    Where the hub does not answer, or refuses, what the cache holds is used, with a warning.

    Raises ``PenstockError``: ``not_found`` for a name or revision that the hub does not know, or that is not in the
    cache while ``HF_HUB_OFFLINE`` is set; ``invalid`` for a missing path, no proper name, a model that the token does
    not open, or a cache that cannot be written; ``unavailable`` for a hub that cannot be reached.
    """
    if not model:
        return demo.CHAT
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        if file := gguf_in(path):
            return checkpoint_folder(file)
        check_checkpoint(path)
        return path
    if isinstance(model, Path) or path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf":
        raise invalid("model", f"there is no {path}: {ADVICE}")
    if token and not (token.isascii() and token.isprintable()):
        raise invalid("hf_token", "is not a token: copy it again, without line breaks")
    return _fetch(model, revision, token or None, cache_dir, progress, files)


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


def download(name: str, folder: Path, *, revision: str = "", token: str | None = None, progress: bool = True) -> None:
    """Download a checkpoint, or the missing part of it, into a folder.

    Raises ``PenstockError`` as ``resolve`` does.
    """
    from huggingface_hub import snapshot_download

    fetch = partial(
        snapshot_download,
        name,
        revision=revision or None,
        token=token,
        local_dir=folder,
        allow_patterns=ALLOW_PATTERNS,
        ignore_patterns=IGNORE_PATTERNS,
        tqdm_class=None if progress else partial(tqdm, disable=True),
    )
    try:
        _retry_on_reset(fetch)
    except Exception as error:  # as in _fetch
        problem = _cause(error)
        raise _as_penstock_error(problem, name, revision) from problem


def _fetch(
    name: str, revision: str, token: str | None, cache_dir: str | Path | None, progress: bool, files: Sequence[str]
) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    download: Callable[..., str] = partial(
        snapshot_download,
        name,
        revision=revision or None,
        token=token,
        cache_dir=cache_dir,
        allow_patterns=list(files),
        ignore_patterns=IGNORE_PATTERNS,
        tqdm_class=None if progress else partial(tqdm, disable=True),
    )
    if COMMIT.fullmatch(revision) and (folder := _whole_in_cache(download, revision)):
        return folder
    try:
        # A silent hub must not keep us waiting: the listing that a download begins with is asked for five times.
        HfApi().model_info(name, revision=revision or None, token=token, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(_retry_on_reset(download))
    except Exception as error:  # HTTP, TLS, xet and file systems have no error in common
        problem = _cause(error)
    try:
        folder = Path(download(local_files_only=True))
    except (OSError, ValueError):
        raise _as_penstock_error(problem, name, revision) from problem
    if not isinstance(problem, OfflineModeIsEnabled):
        logger.warning(
            "%s is taken from the cache, as last fetched. %s", name, _as_penstock_error(problem, name, revision)
        )
    return folder


def _whole_in_cache(download: Callable[..., str], commit: str) -> Path | None:
    """The cache's folder of a commit, which nothing can change, where its listing is there and all of its files."""
    try:
        folder = Path(download(local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if (folder.parent.parent / "trees" / f"{commit}.json").exists() else None


def _retry_on_reset(download: Callable[[], str]) -> str:
    """Retry when a connection is reset; the library itself resumes after other failures only.

    Whole files are not fetched again, and no file has its name before it is whole.
    """
    for pause in RETRY_DELAYS:
        try:
            return download()
        except Exception as error:  # the class of the library's HTTP client, which changed between its versions
            if not _was_reset(error):
                raise
            logger.warning("the connection to the hub was reset (%s), trying again", _line(error))
            time.sleep(pause)
    return download()


def _was_reset(error: BaseException | None) -> bool:
    """Whether an error was caused by a reset connection."""
    while error is not None:
        if isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _cause(error: Exception) -> Exception:
    """The original error behind the library's error that the cache lacks a file."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _as_penstock_error(problem: Exception, name: str, revision: str) -> PenstockError:
    from huggingface_hub import constants, errors

    hub, code, field = constants.ENDPOINT, Code.INVALID, "model"
    match problem:
        case errors.HFValidationError():
            says = f"{name!r} is neither an existing path nor a name on the hub (org/name)"
        case errors.OfflineModeIsEnabled():
            code = Code.NOT_FOUND
            says = f"the cache lacks {name}, or parts of it, and HF_HUB_OFFLINE is set: unset it, or give a folder"
        case errors.RevisionNotFoundError():
            code, field = Code.NOT_FOUND, "revision"
            says = f"{name} at {hub} has no {revision!r}: give one of its branches, tags or commits"
        case errors.GatedRepoError():
            says = f"{name} is gated: ask for access at {hub}/{name}, then set HF_TOKEN or --hf-token"
        case errors.RepositoryNotFoundError():
            code = Code.NOT_FOUND
            says = f"{hub} has no model {name}, or hides it: check the name, or set HF_TOKEN or --hf-token"
        case errors.HfHubHTTPError() if problem.response.status_code in (401, 403):
            says = f"{hub} refuses {name}: set HF_TOKEN or --hf-token to a token that may read it"
        case OSError() if problem.errno:
            field, place = "download_dir", problem.filename or "the cache"
            says = f"cannot write {place} ({problem.strerror}): make room, or name another folder"
        case _:
            code = Code.UNAVAILABLE
            says = f"{name} cannot be fetched from {hub} ({_line(problem)}): check the network and HF_ENDPOINT, "
            says += "or give a folder"
    return PenstockError(code, f"{field}: {says}", field)


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
