"""LoRA adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.layers import LoRALayer, LoRATarget
from penstock.ops import LoRAWeights

from .fused_experts import EXPERT
from .lora_experts import EXPERT_PARAMETERS, LORA_A, LORA_B, PREFIX, split_experts
from .lora_patterns import ValuesByPattern
from .renamed import FUSED

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LANGUAGE_MODELS = ("model.language_model.", "language_model.model.")
"""Prefixes of the layers' names in models that see images, now and in earlier versions of transformers; in this code
it is ``model.``."""
FIELD = "lora_path"
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "bias": ("none",),
    "fan_in_fan_out": (),
    "kasa_config": (),
    "layer_replication": (),
    "lora_bias": (),
    "modules_to_save": ([],),
    "monteclora_config": (),
    "trainable_token_indices": ([], {}),
    "use_bdlora": (),
    "use_dora": (),
    "use_qalora": (),
}
"""Fields of the configuration that are refused, with values besides null and false that have no effect."""
BASE_CHANGING_INITS = ("corda", "lora_ga", "olora", "pissa")
"""Prefixes of ``init_lora_weights`` that change the base model: such an adapter does not fit the original one."""


class LoRAAdapter:
    """An adapter's packed weights for all layers of a model.

    Args:
        version: identifies the adapter's contents on any machine.
        has_experts: whether it adds to matrices of experts.
    """

    def __init__(self, parts: Mapping[LoRALayer, list[LoRAWeights]], version: str, has_experts: bool) -> None:
        self.version = version
        self.has_experts = has_experts
        self._packed = {layer: layer.pack(own) for layer, own in parts.items()}

    def activate(self, slot: int) -> None:
        """Put the weights into a slot that no running step uses."""
        for layer, packed in self._packed.items():
            layer.set(slot, packed)

    def deactivate(self, slot: int) -> None:
        """Empty the slot."""
        for layer in self._packed:
            layer.set(slot, None)


def load_lora(
    folder: Path,
    targets: Mapping[str, LoRATarget | None],
    dtype: torch.dtype,
    device: torch.device,
    max_lora_rank: int,
    *,
    interleaved: bool = False,
) -> LoRAAdapter:
    """Read an adapter for a model.

    Args:
        targets: ``Model.lora_targets``.
        dtype, device: the model's.
        max_lora_rank: the largest rank allowed.
        interleaved: as of ``FusedLayout``.

    Raises ``PenstockError``: ``invalid`` if files are missing, broken or do not fit the model, ``unsupported``
    where the adapter needs what no code here computes.
    """
    config = _config(folder)
    content = _content(folder)
    version = hashlib.sha256(json.dumps(config, sort_keys=True).encode() + content).hexdigest()
    given, names = _named_by_layers(_tensors(content, folder), targets)
    given, of_experts = split_experts(given, targets, names, interleaved)
    tensors, fused = _split_fused(given, targets)
    fused |= of_experts
    parts: dict[LoRALayer, list[LoRAWeights]] = defaultdict(list)
    ranks = ValuesByPattern(config["rank_pattern"], config["r"], FIELD)
    alphas = ValuesByPattern(config["alpha_pattern"], config["lora_alpha"], FIELD)
    modules = sorted({_module(key, targets) for key in tensors})
    for name in modules:
        if not (target := targets[name]):
            continue  # another pipeline stage reads it
        own_name = fused.get(name, name)
        own_name = names.get(own_name, own_name)
        rank = ranks[own_name]
        if not 1 <= rank <= max_lora_rank:
            message = f"{folder} has rank {rank} for {name}, and 1 to {max_lora_rank} (max_lora_rank) are allowed"
            raise invalid(FIELD, message, max_lora_rank)
        a = _checked(tensors, name, LORA_A, (rank, target.inputs), folder)
        b = _checked(tensors, name, LORA_B, (target.shard.total, rank), folder)[slice(*target.shard.rows)]
        alpha = alphas[own_name]
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        weights = LoRAWeights(a.to(device, dtype), b.to(device, dtype), target.offset, scale)
        parts[target.layer].append(weights)
    return LoRAAdapter(parts, version, any(map(EXPERT.fullmatch, modules)))


def _config(folder: Path) -> dict[str, Any]:
    """The fields that loading uses, all present and of the right kind."""
    try:
        given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(FIELD, f"{folder} has no {CONFIG}: name a folder with an adapter that PEFT saved") from error
    except (ValueError, RecursionError) as error:
        raise invalid(FIELD, f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid(FIELD, f"{folder / CONFIG} is not a JSON object")
    if given.get("peft_type") != "LORA":
        kind = str(given.get("peft_type"))[:50]
        raise PenstockError(Code.UNSUPPORTED, f"{folder} is an adapter of type {kind}; LORA is supported", FIELD)
    for name, nothing in UNSUPPORTED.items():
        if given.get(name) not in (None, False, *nothing):
            raise PenstockError(Code.UNSUPPORTED, f"{folder / CONFIG} has {name}, which is not supported", FIELD)
    parameters = given.get("target_parameters") or []
    if not isinstance(parameters, list) or {str(name).rpartition(".")[2] for name in parameters}.difference(
        EXPERT_PARAMETERS
    ):
        supported = " and ".join(EXPERT_PARAMETERS)
        message = f"{folder / CONFIG} has target_parameters {str(parameters)[:200]}; {supported} are supported"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    if (init := str(given.get("init_lora_weights"))).startswith(BASE_CHANGING_INITS):
        message = f"{folder} was begun with {init[:20]}, which changes the base: convert it to plain LoRA on saving"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
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


def _content(folder: Path) -> bytes:
    """The file of weights."""
    path = folder / WEIGHTS
    if not path.exists():
        if (pickle := folder / "adapter_model.bin").exists():
            message = f"{pickle} is a pickle, which can run code and is not loaded. Save it as safetensors."
            raise invalid(FIELD, message)
        raise invalid(FIELD, f"{folder} has no {WEIGHTS}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(FIELD, f"{path} cannot be read ({error})") from error


def _tensors(content: bytes, folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        tensors = load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise invalid(FIELD, f"{path} is damaged ({error})") from error
    if not tensors:
        raise invalid(FIELD, f"{path} holds nothing")
    return tensors


def _named_by_layers(
    tensors: Mapping[str, Tensor], targets: Mapping[str, LoRATarget | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors under the layers' names in this code. Also the checkpoint's name for each matrix that has another."""
    renamed: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        prefix = next((prefix for prefix in LANGUAGE_MODELS if name.startswith(prefix)), "")
        if prefix and name.removesuffix(LORA_A).removesuffix(LORA_B) not in targets:
            own = f"model.{name.removeprefix(prefix)}"
            names[own.removesuffix(LORA_A).removesuffix(LORA_B)] = name.removesuffix(LORA_A).removesuffix(LORA_B)
            key = PREFIX + own
        renamed[key] = tensor
    return renamed, names


def _split_fused(
    tensors: Mapping[str, Tensor], targets: Mapping[str, LoRATarget | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a matrix that the checkpoint has with others in one (``FUSED``) as those of its parts, which share
    ``A`` and have some rows of ``B`` each. Also the checkpoint's name for each of these parts."""
    split: dict[str, Tensor] = {}
    wholes: dict[str, str] = {}
    for key, tensor in tensors.items():
        end = next((end for end in (LORA_A, LORA_B) if key.endswith(end)), "")
        whole = key.removeprefix(PREFIX).removesuffix(end)
        parent, _, last = whole.rpartition(".")
        names = [f"{parent}.{part}" for part in FUSED.get(last, ())]
        if not names or not targets.keys() >= set(names):
            split[key] = tensor
            continue
        sizes = [target.shard.total if (target := targets[name]) else 0 for name in names]
        fits = end == LORA_B and sum(sizes) == len(tensor)
        parts = tensor.split(sizes) if fits else [tensor] * len(names)  # a wrong shape is told of when it is read
        for name, part in zip(names, parts, strict=True):
            split[f"{PREFIX}{name}{end}"] = part
            wholes[name] = whole
    return split, wholes


def _module(key: str, targets: Mapping[str, LoRATarget | None]) -> str:
    """Name of the checkpoint's matrix that a tensor adds to."""
    for end in (LORA_A, LORA_B):
        name = key.removeprefix(PREFIX).removesuffix(end)
        if key == PREFIX + name + end and name in targets:
            return name
    message = f"tensor {key[:200]}: of this model only the layers' linear modules can have adapters"
    if ".experts." in key:
        message = (
            f"tensor {key[:200]} does not fit: experts can have adapters on CPUs, without enable_expert_parallel, with "
            "the names and shapes of this model's experts"
        )
    raise PenstockError(Code.UNSUPPORTED, message, FIELD)


def _checked(tensors: Mapping[str, Tensor], name: str, end: str, shape: tuple[int, int], folder: Path) -> Tensor:
    key = PREFIX + name + end
    if key not in tensors:
        raise invalid(FIELD, f"{folder} has no tensor {key}")
    if tuple(tensors[key].shape) != shape:
        raise invalid(FIELD, f"tensor {key} has shape {tuple(tensors[key].shape)}, and {shape} fits this model")
    if not tensors[key].dtype.is_floating_point:
        raise invalid(FIELD, f"tensor {key} is of {tensors[key].dtype}")
    return tensors[key]
