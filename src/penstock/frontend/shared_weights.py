"""Weights that a Python caller gives as tensors: handed to the engine's processes as a checkpoint in shared memory.

Nothing is pickled: the file is safetensors, which the workers map, and is removed when they have packed it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from penstock import demo
from penstock.checkpoint.config_json import CONFIG, read_plain_config_json
from penstock.checkpoint.engine_config import model_config
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .gguf_folder import checkpoint_folder

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors: TypeAlias = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
"""Tensors by the names that they have in a checkpoint."""
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def as_folder(weights: NamedTensors | str | Path, model: str) -> Iterator[str]:
    """The folder of weights: that of a checkpoint or GGUF file, or one in shared memory with the tensors, until the
    context ends.

    Args:
        model: folder of the served model, whose configuration goes with the tensors; empty for the built-in one.

    Raises ``PenstockError`` where the tensors are none, or shared memory has no room for them.
    """
    if isinstance(weights, str | Path):
        path = Path(weights).absolute()
        yield str(checkpoint_folder(path) if path.suffix == ".gguf" and path.is_file() else path)
        return
    from safetensors.torch import save_file  # which brings PyTorch

    given = list(weights.items() if isinstance(weights, Mapping) else weights)
    names = [name for name, _ in given]
    if len(set(names)) < len(names):
        raise invalid("weights", "have a tensor twice")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in given}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > (free := shutil.disk_usage(SHARED_MEMORY).free):
        words = f"{SHARED_MEMORY} has {free / 1e9:.2f} GB free, and the tensors take {size / 1e9:.2f} GB: enlarge it"
        raise PenstockError(Code.UNSUPPORTED, f"{words}, or save them to a folder and give that", "weights")
    folder = Path(tempfile.mkdtemp(prefix=f"penstock-weights-{os.getpid()}-", dir=SHARED_MEMORY))
    try:
        shared = _without_sharing(tensors)
        save_file(shared, folder / "model.safetensors")
        config = model_config(read_plain_config_json(Path(model) if model else demo.CHAT))
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without_sharing(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory with another, as tied embeddings do, which the format cannot express."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if start in seen or tensor.nbytes < tensor.untyped_storage().nbytes() else tensor
        seen.add(start)
    return result
