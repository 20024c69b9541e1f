"""The folders that TensorRT-LLM's commands write: the checkpoint, its quantization and limits.

Checkpoints are served without conversion. So the folder of ``convert_checkpoint.py`` and ``quantize.py`` holds a
``config.json`` alone, with TensorRT-LLM's names. That of ``trtllm-build`` is an engine folder (``penstock build``);
its ``config.json`` has them, too: ``pretrained_config`` and ``build_config``.
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
"""Folder of the quantized checkpoint, below that of ``quantize.py``."""
ABOUT = "Made by penstock. It holds no weights: those of the checkpoint are served as they are."
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
"""``quant_algo`` → quantization at load, of checkpoints that ``quantize.py`` has quantized to what they hold, or with
activations of 8 bits."""
KV_CACHE = {None: "auto", "INT8": "int8", "FP8": "int8"}
"""``kv_cache_quant_algo`` → ``kv_cache_dtype``."""
MAPPING = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}
"""Settings here, by the size in ``mapping``."""
LIMITS = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_input_len": "max_prompt_len",
    "max_beam_width": "max_beam_width",
}
"""Build limit of an engine → our setting."""
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
    """A ``pretrained_config`` for a checkpoint of Hugging Face.

    Raises ``PenstockError`` (``invalid``) where its folder holds none.
    """
    config = _read(checkpoint)
    if config is None or not any(checkpoint.glob("*.safetensors")):
        raise invalid("model_dir", f"{checkpoint} holds no checkpoint of Hugging Face (config.json, *.safetensors)")
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


def check(folder: Path, beside: str = "") -> None:
    """Make a folder to write to. Raises ``PenstockError`` (``invalid``) where that cannot be done, or where it holds
    something else.

    Args:
        beside: what it may hold besides the configuration.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if other := next((path for path in folder.iterdir() if path.name not in (NAME, beside)), None):
            raise invalid("output_dir", f"{folder} holds {other.name} already; name a folder that is empty or new")
    except OSError as error:
        raise invalid("output_dir", f"{folder} cannot be written: {error.strerror}") from error


def write(folder: Path, config: Mapping[str, Any], beside: str = "") -> None:
    """Write the configuration. Arguments and errors as of ``check``."""
    check(folder, beside)
    try:
        (folder / NAME).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid("output_dir", f"{folder} cannot be written: {error.strerror}") from error


def converted(folder: Path) -> dict[str, Any]:
    """The ``pretrained_config`` in a folder of ``convert_checkpoint.py`` or ``quantize.py``.

    Raises ``PenstockError`` (``invalid``) for another folder.
    """
    config = _read(folder)
    if config is None or "checkpoint" not in config:
        message = (
            f"{folder} is none that convert_checkpoint.py or quantize.py of penstock has made: run one of them with "
        )
        message += "--model_dir for the Hugging Face checkpoint, or penstock build"
        raise invalid("checkpoint_dir", message)
    return config


def settings_of(engine: Path) -> dict[str, Any]:
    """Settings here by what the folder of an engine says; those of TensorRT's own say limits alone, and those that were
    built here bring their own along, too (``planning.engine_config``)."""
    config = _read(engine) or {}
    result = {**engine_defaults(str(engine)), "model": str(engine)} if KEY in config else {}
    return result | limits_of(config.get("build_config", {}))


def limits_of(built: Mapping[str, Any]) -> dict[str, Any]:
    """Settings here by a ``build_config``."""
    result = {setting: built[limit] for limit, setting in LIMITS.items() if built.get(limit)}
    length = built.get("max_seq_len") or (built.get("max_input_len") or 0) + (built.get("max_output_len") or 0)
    return result | ({"max_model_len": length} if length else {})


def checkpoint_settings(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """Settings here by a ``pretrained_config`` that was written here."""
    quantization = pretrained["quantization"]
    if quantization["kv_cache_quant_algo"] == "FP8":
        words = "%s asks for keys and values in FP8: 8-bit integers are used (int8)"
        logger.warning(words, pretrained["checkpoint"])
    result = {"model": pretrained["checkpoint"], "dtype": pretrained["dtype"]}
    result["quantization"] = QUANTIZATION[quantization["quant_algo"]]
    result["kv_cache_dtype"] = KV_CACHE[quantization["kv_cache_quant_algo"]]
    mapping = pretrained["mapping"]
    return result | {setting: mapping[name] for name, setting in MAPPING.items() if mapping[name] != 1}


def _read(folder: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where it cannot be read."""
    try:
        result = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None
