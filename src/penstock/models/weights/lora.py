"""LoRA adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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

from ..stored import Stored
from .fused_experts import EXPERT
from .lora_experts import EXPERT_PARAMETERS, LORA_A, LORA_B, PREFIX, split_experts
from .lora_patterns import ValuesByPattern
from .renamed import FUSED

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LANGUAGE_MODELS = ("model.language_model.", "language_model.model.")
"""Prefixes of layer names in vision-language models, in current and older versions of transformers. Penstock's prefix
is ``model.``."""
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
"""Unsupported field of the configuration → accepted values, which have no effect. Null and false are also accepted."""
BASE_CHANGING_INITS = ("corda", "lora_ga", "olora", "pissa")
"""Prefixes of ``init_lora_weights`` values that change the base model. Such adapters do not fit the original model."""


class LoRAAdapter:
    """Packed weights of an adapter for all layers of a model.

    Args:
        version: digest of the adapter's contents, the same on every machine.
        has_experts: True if the adapter changes matrices of experts.
    """

    def __init__(self, parts: Mapping[LoRALayer, list[LoRAWeights]], version: str, has_experts: bool) -> None:
        self.version = version
        self.has_experts = has_experts
        self._packed = {layer: layer.pack(weights) for layer, weights in parts.items()}

    def activate(self, slot: int) -> None:
        """Put the weights into a slot that no running step uses."""
        for layer, packed in self._packed.items():
            layer.set(slot, packed)

    def deactivate(self, slot: int) -> None:
        """Remove the weights from a slot that no running step uses."""
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
    find_stored: Callable[[str], Stored] | None = None,
) -> LoRAAdapter:
    """Read an adapter for a model.

    Args:
        targets: ``Model.lora_targets``.
        dtype, device: dtype and device of the model.
        max_lora_rank: maximum rank of the adapter.
        interleaved: outputs of fused gate and up projections alternate (``FusedLayout.interleaved``).
        find_stored: function from the name of a matrix to its location in the checkpoint, if several matrices have
            rows of one tensor (``Family.find_stored``).

    Raises ``PenstockError``: ``invalid`` if files are missing, broken, or do not fit the model, ``unsupported`` for
    unsupported features.
    """
    config = _config(folder)
    content = _content(folder)
    version = hashlib.sha256(json.dumps(config, sort_keys=True).encode() + content).hexdigest()
    given, names = _rename(_tensors(content, folder), targets)
    given, expert_parameters = split_experts(given, targets, names, interleaved)
    tensors, fused = _split_fused(given, targets, _rows_of_tensors(targets, find_stored))
    fused |= expert_parameters
    parts: dict[LoRALayer, list[LoRAWeights]] = defaultdict(list)
    ranks = ValuesByPattern(config["rank_pattern"], config["r"], FIELD)
    alphas = ValuesByPattern(config["alpha_pattern"], config["lora_alpha"], FIELD)
    modules = sorted({_module(key, targets) for key in tensors})
    for name in modules:
        if not (target := targets[name]):
            continue  # another pipeline stage has this matrix
        peft_name = fused.get(name, name)
        peft_name = names.get(peft_name, peft_name)
        rank = ranks[peft_name]
        if not 1 <= rank <= max_lora_rank:
            message = f"{folder} has rank {rank} for {name}; it must be from 1 to {max_lora_rank} (max_lora_rank)"
            raise invalid(FIELD, message, max_lora_rank)
        a = _checked(tensors, name, LORA_A, (rank, target.inputs), folder)
        b = _checked(tensors, name, LORA_B, (target.shard.total, rank), folder)[slice(*target.shard.rows)]
        alpha = alphas[peft_name]
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        weights = LoRAWeights(a.to(device, dtype), b.to(device, dtype), target.offset, scale)
        parts[target.layer].append(weights)
    return LoRAAdapter(parts, version, any(map(EXPERT.fullmatch, modules)))


def _config(folder: Path) -> dict[str, Any]:
    """Read and check ``adapter_config.json``. Returns the fields that ``load_lora`` uses, with defaults."""
    try:
        given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(FIELD, f"{folder} has no {CONFIG}: name the folder of an adapter in PEFT's format") from error
    except (ValueError, RecursionError) as error:
        raise invalid(FIELD, f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid(FIELD, f"{folder / CONFIG} is not a JSON object (found: {type(given).__name__})")
    if given.get("peft_type") != "LORA":
        kind = str(given.get("peft_type"))[:50]
        raise PenstockError(Code.UNSUPPORTED, f"{folder} has peft_type {kind}; only LORA is supported", FIELD)
    for name, no_effect in UNSUPPORTED.items():
        if given.get(name) not in (None, False, *no_effect):
            message = f"{folder / CONFIG} sets {name} to {given[name]!r:.40}, which is not supported"
            raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    parameters = given.get("target_parameters") or []
    if not isinstance(parameters, list) or {str(name).rpartition(".")[2] for name in parameters}.difference(
        EXPERT_PARAMETERS
    ):
        supported = " and ".join(EXPERT_PARAMETERS)
        message = f"{folder / CONFIG} has target_parameters {str(parameters)[:200]}; only {supported} are supported"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    if (init := str(given.get("init_lora_weights"))).startswith(BASE_CHANGING_INITS):
        message = f"{folder} was initialized with {init[:20]}, which changes the base model: save it as plain LoRA"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    config = {"r": given.get("r"), "lora_alpha": given.get("lora_alpha"), "use_rslora": bool(given.get("use_rslora"))}
    config |= {name: given.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    if not isinstance(config["r"], int) or not _is_number(config["lora_alpha"]):
        found = f"r {config['r']!r:.40} and lora_alpha {config['lora_alpha']!r:.40}"
        raise invalid(FIELD, f"{folder / CONFIG} has {found}; they must be an integer and a number")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config[name]
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            raise invalid(FIELD, f"{name} in {folder / CONFIG} is {pattern!r:.60}; it must be an object with numbers")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _content(folder: Path) -> bytes:
    path = folder / WEIGHTS
    if not path.exists():
        if (pickle := folder / "adapter_model.bin").exists():
            message = f"{pickle} is a pickle, which can run code and is not loaded: save the adapter as safetensors"
            raise invalid(FIELD, message)
        raise invalid(FIELD, f"{folder} has no {WEIGHTS}: name the folder of an adapter in PEFT's format")
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(FIELD, f"{path} cannot be read ({error})") from error


def _tensors(content: bytes, folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        tensors = load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: torch lacks the dtype
        raise invalid(FIELD, f"{path} is damaged ({error}): download or save the adapter again") from error
    if not tensors:
        raise invalid(FIELD, f"{path} has no tensors: save the adapter again")
    return tensors


def _rename(
    tensors: Mapping[str, Tensor], targets: Mapping[str, LoRATarget | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename tensors to the names of ``targets``. Also returns the original name of each renamed matrix."""
    renamed: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        prefix = next((prefix for prefix in LANGUAGE_MODELS if name.startswith(prefix)), "")
        if prefix and name.removesuffix(LORA_A).removesuffix(LORA_B) not in targets:
            new = f"model.{name.removeprefix(prefix)}"
            names[new.removesuffix(LORA_A).removesuffix(LORA_B)] = name.removesuffix(LORA_A).removesuffix(LORA_B)
            key = PREFIX + new
        renamed[key] = tensor
    return renamed, names


def _rows_of_tensors(
    targets: Iterable[str], find_stored: Callable[[str], Stored] | None
) -> dict[str, dict[str, list[int]]]:
    """For each tensor of the checkpoint with another name, or with the rows of several matrices: the rows of each
    matrix, by its name; an empty list for all rows. Tensors with rows that no adapter can change are left out."""
    found: dict[str, dict[str, list[int]]] = defaultdict(dict)
    totals: dict[str, int] = {}
    for name in targets if find_stored else ():
        stored = find_stored(name) if find_stored else None
        for whole in (stored.name, stored.other) if stored else ():
            if stored and whole and (stored.ranges or whole != name):
                found[whole][name] = [row for first, end in stored.ranges for row in range(first, end)]
                totals[whole] = stored.total if stored.ranges else 0
    return {whole: parts for whole, parts in found.items() if totals[whole] == len({*itertools.chain(*parts.values())})}


def _split_fused(
    tensors: Mapping[str, Tensor],
    targets: Mapping[str, LoRATarget | None],
    rows: Mapping[str, Mapping[str, list[int]]],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split the tensors of fused matrices (``FUSED``, or with ``rows``): the parts share ``A``; each part has some rows
    of ``B``. Also returns the name of the fused matrix for each part."""
    split: dict[str, Tensor] = {}
    fused_names: dict[str, str] = {}
    for key, tensor in tensors.items():
        end = next((end for end in (LORA_A, LORA_B) if key.endswith(end)), "")
        whole = key.removeprefix(PREFIX).removesuffix(end)
        for name, indices in rows.get(whole, {}).items():
            fits = indices and end == LORA_B and max(indices) < len(tensor)
            split[f"{PREFIX}{name}{end}"] = tensor[indices] if fits else tensor  # _checked reports a wrong shape
            fused_names[name] = whole
        if whole in rows:
            continue
        parent, _, last = whole.rpartition(".")
        names = [f"{parent}.{part}" for part in FUSED.get(last, ())]
        if not names or not targets.keys() >= set(names):
            split[key] = tensor
            continue
        sizes = [target.shard.total if (target := targets[name]) else 0 for name in names]
        fits = end == LORA_B and sum(sizes) == len(tensor)
        parts = tensor.split(sizes) if fits else [tensor] * len(names)  # _checked reports a wrong shape
        for name, part in zip(names, parts, strict=True):
            split[f"{PREFIX}{name}{end}"] = part
            fused_names[name] = whole
    return split, fused_names


def _module(key: str, targets: Mapping[str, LoRATarget | None]) -> str:
    """Name in ``targets`` of the matrix that a tensor changes. A matrix missing there raises ``PenstockError``."""
    for end in (LORA_A, LORA_B):
        name = key.removeprefix(PREFIX).removesuffix(end)
        if key == PREFIX + name + end and name in targets:
            return name
    message = f"tensor {key[:200]}: adapters are supported only for linear modules in the layers of this model"
    if ".experts." in key:
        message = (
            f"tensor {key[:200]} does not fit: adapters of experts are supported on CPUs, without "
            "enable_expert_parallel, with the names and shapes of this model's experts"
        )
    raise PenstockError(Code.UNSUPPORTED, message, FIELD)


def _checked(tensors: Mapping[str, Tensor], name: str, end: str, shape: tuple[int, int], folder: Path) -> Tensor:
    key = PREFIX + name + end
    if key not in tensors:
        raise invalid(FIELD, f"{folder} has no tensor {key}")
    if tuple(tensors[key].shape) != shape:
        raise invalid(FIELD, f"tensor {key} has shape {tuple(tensors[key].shape)}; it must be {shape} for this model")
    if not tensors[key].dtype.is_floating_point:
        raise invalid(FIELD, f"tensor {key} has dtype {tensors[key].dtype}; it must be floating-point")
    return tensors[key]
