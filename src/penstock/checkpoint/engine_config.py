"""Engine folders, which ``penstock build`` writes: a model with its weights packed for one kind of kernels.

D/config.json              the model's own, and under ``engine_config`` what the folder was built for
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
"""Of ``config.json``."""
NOTES = ("about", "pretrained_config", "build_config")
"""Further entries of ``config.json``, of TensorRT-LLM's engine folders."""
UNFINISHED = f"{CONFIG}.part"
"""The name of ``config.json`` until all else of the folder is written."""
DECIDED = ("dtype", "quantization", "tensor_parallel_size", "pipeline_parallel_size")
"""Options that a build decides for good."""
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prompt_len", "max_output_len")
RECORDED = (*LIMITS, "kv_cache_dtype")
"""Options that a build records as the defaults of servers, where they are given."""


class EngineConfig(msgspec.Struct, frozen=True):
    """What an engine folder was built for."""

    producer: str
    """Version of Penstock."""
    layout: str
    """``Ops.LAYOUT`` of the kernels."""
    weights_version: str
    """That of the checkpoint (``checkpoint_digest``)."""
    checkpoint: str
    """Where that was, for people."""
    dtype: str
    """That the model computes in."""
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    layers: tuple[int, ...]
    """Number of layers of each pipeline stage."""
    mtp: bool
    """Whether it has the layers for multi-token prediction."""
    max_shard_size: int
    """Bytes of a file, about."""
    options: dict[str, int | str] = {}
    """Those of ``RECORDED`` that were given."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stage_of(self, layers: range | None, num_layers: int) -> int:
        """The pipeline stage that computes these layers, None being all. Raises ``PenstockError`` (``invalid``) where
        none does."""
        layers, first = layers or range(num_layers), 0
        for stage, count in enumerate(self.layers):
            if layers == range(first, first + count):
                return stage
            first += count
        words = f"the engine folder was built for {self.pipeline_parallel_size} stages of these numbers of layers: "
        words += f"{', '.join(map(str, self.layers))}; leave pipeline_parallel_size out, or build it again"
        raise invalid("pipeline_parallel_size", words, self.pipeline_parallel_size)

    def defaults(self) -> dict[str, Any]:
        """The options with which to serve the folder where no others are given."""
        decided = {name: getattr(self, name) for name in DECIDED}
        if self.pipeline_parallel_size > 1:
            decided["pipeline_parallel_layers"] = ",".join(map(str, self.layers))
        return {**self.options, **decided}

    def check(self, folder: Path, options: Mapping[str, Any], layout: str = "") -> None:
        """Raise ``PenstockError`` (``invalid``) where the folder is not for these kernels, or options contradict it.

        Args:
            options: of ``DECIDED``.
            layout: of the kernels, where it is known.
        """
        again = f"build it again from the checkpoint (it was {self.checkpoint})"
        if self.producer != __version__:
            raise invalid(
                "model", f"{folder} was built by Penstock {self.producer}, and this is {__version__}; {again}"
            )
        if layout and self.layout != layout:
            words = f"{folder} was built for kernels of the layout {self.layout}, and those here have {layout}"
            raise invalid("model", f"{words}; {again} with the --device or --ops that are to serve it")
        for name, value in options.items():
            built = getattr(self, name)
            if value != built and (name, value) != ("dtype", "auto"):
                raise invalid(name, f"is {value}, and {folder} was built for {built}: leave it out, or {again}")


def read_engine_config(folder: Path) -> EngineConfig | None:
    """What a folder was built for; None for any other folder. Raises ``PenstockError`` (``invalid``) where it cannot be
    read."""
    if not (folder / CONFIG).is_file():
        return None
    return engine_config_of(read_config_json(folder, weights=False), folder)


def engine_config_of(config: Mapping[str, Any], folder: Path) -> EngineConfig | None:
    """As ``read_engine_config``, of the object in ``config.json``."""
    if KEY not in config:
        return None
    try:
        result = msgspec.convert(config[KEY], EngineConfig)
    except msgspec.ValidationError as error:
        raise invalid("model", f"{folder / CONFIG} has a damaged {KEY} ({error}); build the folder again") from error
    sizes = result.tensor_parallel_size, result.pipeline_parallel_size, *result.layers
    if (
        min(sizes) < 1
        or len(result.layers) != result.pipeline_parallel_size
        or not result.options.keys() <= set(RECORDED)
    ):
        raise invalid("model", f"{folder / CONFIG} has a {KEY} that says what cannot be; build the folder again")
    return result


def engine_defaults(model: str) -> dict[str, Any]:
    """The options with which to serve a model that is an engine folder; none for another model. A folder that cannot
    be read has none either: whoever serves it says why."""
    try:
        built = read_engine_config(Path(model).expanduser()) if model else None
    except Exception:
        return {}
    return built.defaults() if built else {}


def model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own part of ``config.json``."""
    return {name: value for name, value in config.items() if name != KEY and (KEY not in config or name not in NOTES)}


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the files of a rank are."""
    return folder / f"rank_{rank}"


def shard_name(number: int) -> str:
    return f"weights-{number:05d}.packed"
