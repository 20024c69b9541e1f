"""Adapters of experts that PEFT saves as one pair of matrices for all experts of a layer (``target_parameters``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.layers import LoRATarget

from .fused_experts import EXPERT

PREFIX = "base_model.model."
"""Prefix of all tensors' names; the name of the checkpoint's matrix follows."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Names of the parameters in transformers."""
LAYER = re.compile(r".+\.layers\.\d+\.")
WRAPPED = ".base_layer"
"""Where both parameters of a layer have adapters, one pair has this behind its name."""


def split_experts(
    tensors: Mapping[str, Tensor],
    targets: Mapping[str, LoRATarget | None],
    names: Mapping[str, str],
    interleaved: bool,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each expert's tensors in place of those of all experts of a layer. Also the name of the parameter that these
    adapt, by the expert's matrix. Tensors that fit no parameter of the model stay.

    Args:
        names: the checkpoint's names of modules that have others in this code.
        interleaved: as of ``FusedLayout``.
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
        if (target := targets[first]) is None:  # another pipeline stage reads it
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
    """Names of the matrices of experts: by module, expert, and number of the projection (gate, up, down)."""
    modules: dict[str, dict[int, dict[int, str]]] = {}
    for name in targets:
        if found := EXPERT.fullmatch(name):
            own = modules.setdefault(found[1], {}).setdefault(int(found[2]), {})
            own[len(own)] = name
    return modules


def _find(modules: Mapping[str, dict[int, dict[int, str]]], name: str) -> dict[int, dict[int, str]] | None:
    """The experts of a module, which has another name in some checkpoints than in transformers."""
    if name in modules or not name.endswith(".experts") or not (layer := LAYER.match(name)):
        return modules.get(name)
    others = [own for own in modules if own.startswith(layer[0])]
    return modules[others[0]] if len(others) == 1 else None


def _parts(
    a: Tensor, b: Tensor, experts: int, sizes: tuple[int, int], interleaved: bool
) -> Iterator[tuple[str, int, int, Tensor, Tensor]]:
    """Parameter, expert, number of the projection, ``A`` and ``B`` of each expert's matrices;
    nothing where shapes fit no parameter.

    Args:
        a: ``[experts * rank, inputs]``, ranks of one expert beside each other.
        b: ``[outputs, rank * experts]``, those of all experts beside each other. PEFT takes outputs for inputs in some
            models, by the order of the parameter's dimensions; shapes tell.
        sizes: inputs and outputs of the gate.
    """
    hidden, size = sizes
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] % experts:
        return
    shapes = dict(zip(EXPERT_PARAMETERS, ((hidden, 2 * size), (size, hidden)), strict=True))
    given = a.shape[1], b.shape[0]
    parameter = next((name for name, shape in shapes.items() if given in (shape, shape[::-1])), None)
    if parameter is None:
        return
    of_a, of_b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if given != shapes[parameter]:
        of_a, of_b = of_b.mT, of_a.mT
    for expert in range(experts):
        own_a, own_b = of_a[expert].contiguous(), of_b[expert]
        if parameter == "down_proj":
            yield parameter, expert, 2, own_a, own_b.contiguous()
            continue
        halves = (own_b[::2], own_b[1::2]) if interleaved else own_b.chunk(2)
        for number, half in enumerate(halves):
            yield parameter, expert, number, own_a, half.contiguous()
