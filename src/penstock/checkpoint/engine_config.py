"""Engine folders, written by ``penstock build``: a model with its weights packed for one kind of kernels.

D/config.json              the model's ``config.json``, with the build's ``EngineConfig`` under ``engine_config``
D/tokenizer.json …         the model's other small files
D/rank_0/weights-00000.packed …   packed weights of each rank (pipeline stage * tensor_parallel_size + rank)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import invalid
from penstock.version import __version__

from .config_json import CONFIG, read_config_json

KEY = "engine_config"
"""Key of ``EngineConfig`` in ``config.json``."""
TRTLLM_KEYS = ("about", "pretrained_config", "build_config")
"""Further keys of ``config.json``, as in TensorRT-LLM's engine folders."""
UNFINISHED = f"{CONFIG}.part"
"""Name of ``config.json`` until all other files of the folder are written."""
FIXED_OPTIONS = ("dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size")
"""Options fixed by a build: the server cannot change them."""
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prompt_len", "max_output_len")
RECORDED = (*LIMITS, "kv_cache_dtype")
"""Options given to ``penstock build`` that are defaults of the server."""


class EngineConfig(msgspec.Struct, frozen=True):
    """Configuration that an engine folder was built for."""

    producer: str
    """Version of Penstock."""
    layout: str
    """``Ops.LAYOUT`` of the kernels."""
    weights_version: str
    """``checkpoint_digest`` of the checkpoint."""
    checkpoint: str
    """Path of the checkpoint, for messages."""
    dtype: str
    """Dtype of the computation."""
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    layers: tuple[int, ...]
    """Number of layers of each pipeline stage."""
    mtp: bool
    """True if the folder has the layers for multi-token prediction."""
    max_shard_size: int
    """Approximate maximum size of a file in bytes."""
    options: dict[str, int | str] = {}
    """Values of the options in ``RECORDED`` that were given to the build."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stage_of(self, layers: range | None, num_layers: int) -> int:
        """The pipeline stage with these layers (None: all). Raises ``PenstockError`` (``invalid``) if no stage has
        them."""
        layers, first = layers or range(num_layers), 0
        for stage, count in enumerate(self.layers):
            if layers == range(first, first + count):
                return stage
            first += count
        message = f"no stage has the {len(layers)} layers from {layers.start} on; the engine folder was built for "
        message += f"{self.pipeline_parallel_size} stages with {', '.join(map(str, self.layers))} layers: "
        message += "leave pipeline_parallel_size out, or build the folder again"
        raise invalid("pipeline_parallel_size", message, self.pipeline_parallel_size)

    def defaults(self) -> dict[str, Any]:
        """Default options of a server of this folder."""
        fixed = {name: getattr(self, name) for name in FIXED_OPTIONS}
        if self.pipeline_parallel_size > 1:
            fixed["pipeline_parallel_layers"] = ",".join(map(str, self.layers))
        return {**self.options, **fixed}

    def check(self, folder: Path, options: Mapping[str, Any], layout: str = "") -> None:
        """Raise ``PenstockError`` (``invalid``) if the folder was built for other kernels or options.

        Args:
            options: some of ``FIXED_OPTIONS``.
            layout: ``Ops.LAYOUT`` of the kernels; "": not checked.
        """
        rebuild = f"build it again from the checkpoint (it was {self.checkpoint})"
        if self.producer != __version__:
            raise invalid(
                "model", f"{folder} was built by Penstock {self.producer}; this is Penstock {__version__}: {rebuild}"
            )
        if layout and self.layout != layout:
            message = f"{folder} was built for kernels with layout {self.layout}; the kernels here use layout {layout}"
            raise invalid("model", f"{message}; {rebuild} with the --device or --ops that will serve it")
        for name, value in options.items():
            built = getattr(self, name)
            if value != built and (name, value) != ("dtype", "auto"):
                raise invalid(name, f"is {value}, but {folder} was built with {built}: leave it out, or {rebuild}")


def read_engine_config(folder: Path) -> EngineConfig | None:
    """The configuration of an engine folder; None for other folders. Raises ``PenstockError`` (``invalid``) if
    ``config.json`` cannot be read."""
    if not (folder / CONFIG).is_file():
        return None
    return engine_config_of(read_config_json(folder, weights=False), folder)


def engine_config_of(config: Mapping[str, Any], folder: Path) -> EngineConfig | None:
    """Same as ``read_engine_config``, from the object in ``config.json``."""
    if KEY not in config:
        return None
    try:
        result = msgspec.convert(config[KEY], EngineConfig)
    except msgspec.ValidationError as error:
        raise invalid("model", f"{folder / CONFIG}: {KEY} is damaged ({error}); build the folder again") from error
    sizes = result.tensor_parallel_size, result.pipeline_parallel_size, *result.layers
    if (
        min(sizes) < 1
        or len(result.layers) != result.pipeline_parallel_size
        or not result.options.keys() <= set(RECORDED)
    ):
        message = f"tensor_parallel_size {sizes[0]}, pipeline_parallel_size {sizes[1]}, layers {result.layers}"
        message += f", options {list(result.options)}"
        raise invalid("model", f"{folder / CONFIG}: {KEY} is inconsistent ({message}); build the folder again")
    return result


def engine_defaults(model: str) -> dict[str, Any]:
    """Default options of a server of an engine folder; empty for other models. Also empty for a folder that cannot be
    read: the loader reports that."""
    try:
        built = read_engine_config(Path(model).expanduser()) if model else None
    except Exception:
        return {}
    return built.defaults() if built else {}


def model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` without the keys of engine folders."""
    added = (KEY, *TRTLLM_KEYS) if KEY in config else ()
    return {name: value for name, value in config.items() if name not in added}


def rank_folder(folder: Path, rank: int) -> Path:
    """Folder with the files of a rank."""
    return folder / f"rank_{rank}"


def shard_name(number: int) -> str:
    return f"weights-{number:05d}.packed"
