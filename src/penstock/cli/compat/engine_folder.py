"""Output folders of TensorRT-LLM's commands, which record the checkpoint, its quantization and limits.

Checkpoints are not converted, so ``convert_checkpoint.py`` and ``quantize.py`` write only a ``config.json`` with
TensorRT-LLM's names. ``trtllm-build`` writes an engine folder (``penstock build``). Its ``config.json`` also has
``pretrained_config`` and ``build_config``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.engine_config import KEY, engine_defaults
from penstock.core.errors import invalid
from penstock.planning.model_size import model_size_of
from penstock.version import __version__

logger = logging.getLogger(__name__)

NAME = "config.json"
QUANTIZED = "checkpoint"
"""Subfolder for the quantized checkpoint in the output folder of ``quantize.py``."""
ABOUT = "Written by penstock. This folder has no weights: the server loads those of the checkpoint."
QUANTIZATION = {
    None: "none",
    "W8A16": "wint8",
    "W4A16": "wint4",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "none",
    "FP8": "none",
    "W4A16_AWQ": "none",
    "W4A8_AWQ": "w4a8",
    "W4A16_GPTQ": "none",
}
"""``quantization`` (at load) by ``quant_algo``. ``none``: the checkpoint is already quantized by ``quantize.py``."""
KV_CACHE = {None: "auto", "INT8": "int8", "FP8": "int8"}
"""``kv_cache_dtype`` by ``kv_cache_quant_algo``."""
MAPPING = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}
"""Settings by key of ``mapping``."""
LIMITS = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_input_len": "max_prompt_len",
    "max_beam_width": "max_beam_width",
}
"""Settings by build limit of an engine."""
SHARED_FIELDS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "intermediate_size"),
)
"""Fields that Hugging Face's and TensorRT-LLM's ``config.json`` have in common."""


def pretrained_config(
    checkpoint: Path,
    dtype: str,
    quant_algo: str | None,
    kv_cache_quant_algo: str | None,
    tp_size: int = 1,
    pp_size: int = 1,
) -> dict[str, Any]:
    """Create a ``pretrained_config`` for a Hugging Face checkpoint.

    Raises ``PenstockError`` (``invalid``) if the folder has no checkpoint.
    """
    config = _read(checkpoint)
    if config is None or not any(checkpoint.glob("*.safetensors")):
        raise invalid("model_dir", f"{checkpoint} has no Hugging Face checkpoint (config.json, *.safetensors)")
    shape = model_size_of(config)
    return {
        "about": ABOUT,
        "producer": {"name": "penstock", "version": __version__},
        "checkpoint": str(checkpoint.resolve()),
        "architecture": shape.architecture,
        "dtype": dtype,
        "logits_dtype": "float32",
        **{name: config[name] for name in SHARED_FIELDS if name in config},
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
        "quantization": {"quant_algo": quant_algo, "kv_cache_quant_algo": kv_cache_quant_algo},
    }


def check(folder: Path, allowed: str = "") -> None:
    """Create an output folder. Raises ``PenstockError`` (``invalid``) if it cannot be created, or has other files.

    Args:
        allowed: name that the folder may contain in addition to ``config.json``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if other := next((path for path in folder.iterdir() if path.name not in (NAME, allowed)), None):
            raise invalid("output_dir", f"{folder} already has {other.name}: give a new or empty folder")
    except OSError as error:
        raise invalid("output_dir", f"{folder} cannot be written: {error.strerror}") from error


def write(folder: Path, config: Mapping[str, Any], allowed: str = "") -> None:
    """Write ``config`` to ``config.json``. Folder, ``allowed`` and errors are as for ``check``."""
    check(folder, allowed)
    try:
        (folder / NAME).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid("output_dir", f"{folder} cannot be written: {error.strerror}") from error


def converted(folder: Path) -> dict[str, Any]:
    """Read the ``pretrained_config`` in a folder of ``convert_checkpoint.py`` or ``quantize.py``.

    Raises ``PenstockError`` (``invalid``) for any other folder.
    """
    config = _read(folder)
    if config is None or "checkpoint" not in config:
        message = f"{folder} was not written by penstock's convert_checkpoint.py or quantize.py: run one of them with "
        message += "--model_dir for the Hugging Face checkpoint, or penstock build"
        raise invalid("checkpoint_dir", message)
    return config


def settings_of(engine: Path) -> dict[str, Any]:
    """Settings stored in an engine folder. Engines of TensorRT have only limits; engine folders of Penstock also have
    options (``checkpoint.engine_config``)."""
    config = _read(engine) or {}
    result = {**engine_defaults(str(engine)), "model": str(engine)} if KEY in config else {}
    return result | limits_of(config.get("build_config", {}))


def limits_of(built: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for the limits of a ``build_config``."""
    result = {setting: built[limit] for limit, setting in LIMITS.items() if built.get(limit)}
    length = built.get("max_seq_len") or (built.get("max_input_len") or 0) + (built.get("max_output_len") or 0)
    return result | ({"max_model_len": length} if length else {})


def checkpoint_settings(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for a ``pretrained_config`` written by Penstock."""
    quantization = pretrained["quantization"]
    if quantization["kv_cache_quant_algo"] == "FP8":
        logger.warning("%s has an FP8 KV cache; int8 is used instead", pretrained["checkpoint"])
    result = {"model": pretrained["checkpoint"], "dtype": pretrained["dtype"]}
    result["quantization"] = QUANTIZATION[quantization["quant_algo"]]
    result["kv_cache_dtype"] = KV_CACHE[quantization["kv_cache_quant_algo"]]
    mapping = pretrained["mapping"]
    return result | {setting: mapping[name] for name, setting in MAPPING.items() if mapping[name] != 1}


def _read(folder: Path) -> dict[str, Any] | None:
    """Read the JSON object in a folder's ``config.json``; None if it cannot be read."""
    try:
        result = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None
