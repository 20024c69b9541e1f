"""Weights given as tensors, passed to the engine's processes as a checkpoint in shared memory.

Nothing is pickled: the workers map a safetensors file, which is deleted once they have packed it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
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
"""Tensors by their names in a checkpoint."""
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def as_checkpoint_folder(weights: NamedTensors | str | Path, model: str) -> Iterator[str]:
    """Context with a checkpoint folder for weights: for a path the folder of the checkpoint or GGUF file, for tensors a
    temporary folder in shared memory.

    Args:
        model: folder of the served model; its configuration is added to the tensors. Empty: the built-in model.

    Raises ``PenstockError`` if a tensor is given twice, or shared memory has too little space.
    """
    if isinstance(weights, str | Path):
        path = Path(weights).absolute()
        yield str(checkpoint_folder(path) if path.suffix == ".gguf" and path.is_file() else path)
        return
    from safetensors.torch import save_file  # deferred: imports PyTorch

    given = list(weights.items() if isinstance(weights, Mapping) else weights)
    twice = [name for name, count in Counter(name for name, _ in given).items() if count > 1]
    if twice:
        raise invalid("weights", f"contain two tensors of the same name ({twice[0]})")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in given}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > (free := shutil.disk_usage(SHARED_MEMORY).free):
        space = f"the tensors need {size / 1e9:.2f} GB, and {SHARED_MEMORY} has {free / 1e9:.2f} GB free"
        message = f"{space}: enlarge it, or save the tensors to a folder and pass its path"
        raise PenstockError(Code.UNSUPPORTED, message, "weights")
    folder = Path(tempfile.mkdtemp(prefix=f"penstock-weights-{os.getpid()}-", dir=SHARED_MEMORY))
    try:
        save_file(_unshared(tensors), folder / "model.safetensors")
        config = model_config(read_plain_config_json(Path(model) if model else demo.CHAT))
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share memory with another (such as tied embeddings), which safetensors does not support."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if start in seen or tensor.nbytes < tensor.untyped_storage().nbytes() else tensor
        seen.add(start)
    return result
