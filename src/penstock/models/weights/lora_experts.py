"""LoRA adapters of fused experts (PEFT's ``target_parameters``): one pair A, B for all experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.layers import LoRATarget

from .fused_experts import EXPERT

PREFIX = "base_model.model."
"""Prefix of all tensor names, before the name of the matrix in the checkpoint."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Names of the fused parameters in transformers."""
LAYER = re.compile(r".+\.layers\.\d+\.")
WRAPPED = ".base_layer"
"""Suffix of the module name in one of the two pairs of a layer, if both parameters have adapters."""


def split_experts(
    tensors: Mapping[str, Tensor],
    targets: Mapping[str, LoRATarget | None],
    names: Mapping[str, str],
    interleaved: bool,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split the tensors of fused experts into tensors for each expert. Also returns the name of the fused parameter for
    each expert's matrix. Tensors that fit no parameter of the model are returned unchanged.

    Args:
        names: original names of renamed modules.
        interleaved: outputs of fused gate and up projections alternate (``FusedLayout.interleaved``).
    """
    modules = _modules(targets)
    split, parameters = dict(tensors), {}
    for key in tensors:
        whole = key.removeprefix(PREFIX).removesuffix(LORA_A)
        module = whole.removesuffix(WRAPPED)
        if not key.endswith(LORA_A) or not (experts := _find(modules, module)):
            continue
        keys = key, f"{PREFIX}{whole}{LORA_B}"
        first = next(iter(experts[0].values()))
        if (target := targets[first]) is None:  # another pipeline stage has this layer
            for old, end in zip(keys, (LORA_A, LORA_B), strict=True):
                split[f"{PREFIX}{first}{end}"] = split.pop(old, torch.empty(0))
            continue
        if keys[1] not in tensors:
            continue
        sizes = target.inputs, target.shard.total
        for parameter, expert, last, a, b in _parts(tensors[key], tensors[keys[1]], len(experts), sizes, interleaved):
            name = experts[expert][last]
            split |= {f"{PREFIX}{name}{LORA_A}": a, f"{PREFIX}{name}{LORA_B}": b}
            parameters[name] = f"{names.get(whole, whole).removesuffix(WRAPPED)}.{parameter}"
            for old in keys:
                split.pop(old, None)
    return split, parameters


def _modules(targets: Mapping[str, LoRATarget | None]) -> dict[str, dict[int, dict[int, str]]]:
    """Names of the experts' matrices by module, expert, and index of the projection (gate, up, down)."""
    modules: dict[str, dict[int, dict[int, str]]] = {}
    for name in targets:
        if found := EXPERT.fullmatch(name):
            projections = modules.setdefault(found[1], {}).setdefault(int(found[2]), {})
            projections[len(projections)] = name
    return modules


def _find(modules: Mapping[str, dict[int, dict[int, str]]], name: str) -> dict[int, dict[int, str]] | None:
    """The experts of a module. The name of the module in transformers may differ from its name in the checkpoint."""
    if name in modules or not name.endswith(".experts") or not (layer := LAYER.match(name)):
        return modules.get(name)
    in_layer = [module for module in modules if module.startswith(layer[0])]
    return modules[in_layer[0]] if len(in_layer) == 1 else None


def _parts(
    a: Tensor, b: Tensor, experts: int, sizes: tuple[int, int], interleaved: bool
) -> Iterator[tuple[str, int, int, Tensor, Tensor]]:
    """Yield parameter, expert, index of the projection, ``A`` and ``B`` for each matrix of an expert; nothing if the
    shapes fit no parameter.

    Args:
        a: ``[experts * rank, inputs]``, with the rows of one expert together.
        b: ``[outputs, rank * experts]``, with the columns of one rank index together. For some models PEFT swaps inputs
            and outputs, depending on the order of the parameter's dimensions; the shapes show this.
        sizes: inputs and outputs of the gate projection.
    """
    hidden, size = sizes
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] % experts:
        return
    shapes = dict(zip(EXPERT_PARAMETERS, ((hidden, 2 * size), (size, hidden)), strict=True))
    given = a.shape[1], b.shape[0]
    parameter = next((name for name, shape in shapes.items() if given in (shape, shape[::-1])), None)
    if parameter is None:
        return
    all_a, all_b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if given != shapes[parameter]:
        all_a, all_b = all_b.mT, all_a.mT
    for expert in range(experts):
        expert_a, expert_b = all_a[expert].contiguous(), all_b[expert]
        if parameter == "down_proj":
            yield parameter, expert, 2, expert_a, expert_b.contiguous()
            continue
        halves = (expert_b[::2], expert_b[1::2]) if interleaved else expert_b.chunk(2)
        for number, half in enumerate(halves):
            yield parameter, expert, number, expert_a, half.contiguous()
