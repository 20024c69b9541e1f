"""Adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.layers import Adapted, Target
from penstock.ops import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of all tensors' names, which go on with those of the checkpoint's matrices."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
FIELD = "lora_path"
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "bias": ("none",),
    "fan_in_fan_out": (),
    "kasa_config": (),
    "layer_replication": (),
    "lora_bias": (),
    "modules_to_save": ([],),
    "monteclora_config": (),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_bdlora": (),
    "use_dora": (),
    "use_qalora": (),
}
"""What a configuration may ask for and no code here does, with values besides null and false that ask for nothing."""
CHANGE_THE_BASE = ("corda", "lora_ga", "olora", "pissa")
"""Beginnings of ``init_lora_weights`` after which the adapter fits another base than the one that it names."""


class Adapter:
    """What an adapter adds to a model, ready to be put into a slot."""

    def __init__(self, parts: Mapping[Adapted, list[LowRank]]) -> None:
        self._packed = {adapted: adapted.pack(own) for adapted, own in parts.items()}

    def put(self, slot: int) -> None:
        """Into a slot that no request uses."""
        for adapted, packed in self._packed.items():
            adapted.put(slot, packed)

    def take_out(self, slot: int) -> None:
        """Out of the slot that it was put into."""
        for adapted in self._packed:
            adapted.put(slot, None)


def read_adapter(
    folder: Path, targets: Mapping[str, Target], dtype: torch.dtype, device: torch.device, max_lora_rank: int
) -> Adapter:
    """Read an adapter for a model.

    Args:
        targets: what the model's adapters may add to, by the names of the checkpoint's matrices.
        dtype, device: the model's.
        max_lora_rank: the largest rank allowed.

    Raises ``PenstockError``: ``invalid`` where files are missing or broken or do not fit the model, ``unsupported``
    where the adapter asks for what no code here does.
    """
    config = _config(folder)
    tensors = _tensors(folder)
    parts: dict[Adapted, list[LowRank]] = defaultdict(list)
    for name in sorted({_module(key, targets) for key in tensors}):
        target, rank = targets[name], _of_pattern(config["rank_pattern"], name, config["r"])
        if not 1 <= rank <= max_lora_rank:
            words = f"{folder} has rank {rank} for {name}, and 1 to {max_lora_rank} (max_lora_rank) are allowed"
            raise invalid(FIELD, words, max_lora_rank)
        down = _fitting(tensors, name, DOWN, (rank, target.inputs), folder)
        up = _fitting(tensors, name, UP, (target.outputs, rank), folder)
        alpha = _of_pattern(config["alpha_pattern"], name, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        parts[target.adapted].append(LowRank(down.to(device, dtype), up.to(device, dtype), target.first, scale))
    return Adapter(parts)


def _config(folder: Path) -> dict[str, Any]:
    """What the loading goes by, with nothing missing."""
    try:
        given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(FIELD, f"{folder} has no {CONFIG}: name a folder with an adapter that PEFT saved") from error
    except (ValueError, RecursionError) as error:
        raise invalid(FIELD, f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid(FIELD, f"{folder / CONFIG} is no JSON object")
    if given.get("peft_type") != "LORA":
        kind = str(given.get("peft_type"))[:50]
        raise PenstockError(Code.UNSUPPORTED, f"{folder} is an adapter of type {kind}; LORA is supported", FIELD)
    for name, nothing in NOT_SUPPORTED.items():
        if given.get(name) not in (None, False, *nothing):
            raise PenstockError(Code.UNSUPPORTED, f"{folder / CONFIG} has {name}, which is not supported", FIELD)
    if (begun := str(given.get("init_lora_weights"))).startswith(CHANGE_THE_BASE):
        words = f"{folder} was begun with {begun[:20]}, which changes the base: convert it to plain LoRA when saving it"
        raise PenstockError(Code.UNSUPPORTED, words, FIELD)
    config = {"r": given.get("r"), "lora_alpha": given.get("lora_alpha"), "use_rslora": bool(given.get("use_rslora"))}
    config |= {name: given.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    if not isinstance(config["r"], int) or not _is_number(config["lora_alpha"]):
        raise invalid(FIELD, f"{folder / CONFIG} lacks r or lora_alpha, or they are no numbers")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config[name]
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            raise invalid(FIELD, f"{folder / CONFIG} has a {name} that does not give numbers by name")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.exists():
        if (pickle := folder / "adapter_model.bin").exists():
            words = f"{pickle} is a pickle, which can run code and is not loaded. Save it as safetensors."
            raise invalid(FIELD, words)
        raise invalid(FIELD, f"{folder} has no {WEIGHTS}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise invalid(FIELD, f"{path} is damaged ({error})") from error
    if not tensors:
        raise invalid(FIELD, f"{path} holds nothing")
    return tensors


def _module(key: str, targets: Mapping[str, Target]) -> str:
    """The matrix that a tensor adds to."""
    for end in (DOWN, UP):
        name = key.removeprefix(PREFIX).removesuffix(end)
        if key == PREFIX + name + end and name in targets:
            return name
    words = f"tensor {key[:200]}: of this model only the layers' linear modules can have adapters"
    raise PenstockError(Code.UNSUPPORTED, words, FIELD)


def _fitting(tensors: Mapping[str, Tensor], name: str, end: str, shape: tuple[int, int], folder: Path) -> Tensor:
    key = PREFIX + name + end
    if key not in tensors:
        raise invalid(FIELD, f"{folder} has no tensor {key}")
    if tuple(tensors[key].shape) != shape:
        raise invalid(FIELD, f"tensor {key} has shape {tuple(tensors[key].shape)}, and {shape} fits this model")
    if not tensors[key].dtype.is_floating_point:
        raise invalid(FIELD, f"tensor {key} is of {tensors[key].dtype}")
    return tensors[key]


def _of_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """PEFT's rule: the first key that is the name, or its end, as a regular expression."""
    try:
        return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), default)
    except re.error as error:
        raise invalid(FIELD, f"a pattern of the adapter is no regular expression: {error}") from error
