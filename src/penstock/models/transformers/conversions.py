"""Names of a checkpoint's tensors in transformers, which renames and merges tensors when it loads a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

GATE, UP, DOWN, GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"
"""Projections of experts, and the parameter with the first two."""
LAYOUT = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""Attributes of modules of experts that the experts interface of transformers describes."""
ExpertNames = dict[str, Sequence[str]]
"""Names of the experts' matrices in the checkpoint by projection (``GATE``, ``UP``, ``DOWN``)."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules with the experts interface of transformers, with their names."""
    for name, module in model.named_modules():
        if all(hasattr(module, each) for each in LAYOUT):
            yield name, module


class Conversions:
    """Renames and conversions of a checkpoint's tensors for a model on the meta device."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model)
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
        self._prefix, self._parameters = model.base_model_prefix, model.state_dict()

    def find(self, name: str) -> tuple[str, str]:
        """The parameter that a tensor is loaded into, and the pattern of its conversion ("": none)."""
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._parameters)
        if renamed not in self._parameters and name in self._parameters:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self._parameters)
        return renamed, pattern or ""

    def parameter_of(self, name: str) -> str:
        """The parameter that a tensor is loaded into unmodified; "" for a tensor that is converted."""
        parameter, pattern = self.find(name)
        return "" if pattern else parameter

    def stacked_patterns(self, pattern: str) -> Sequence[str]:
        """Patterns of the tensors that a conversion stacks by expert, and then concatenates by outputs; empty for
        another conversion."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        converter = next(each for each in self._converters if pattern in each.source_patterns)
        operations = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
        if operations not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            return []
        patterns: list[str] = converter.source_patterns
        return patterns


@dataclass(frozen=True)
class StoredExperts:
    """A parameter of experts that the checkpoint stores as one matrix per expert and projection."""

    module: str
    parameter: str
    names: Mapping[str, Sequence[str]]
    """Names of the matrices of all experts by projection."""
    keys: frozenset[str]
    """Names of the tensors that transformers would load."""


def stored_experts(
    model: nn.Module,
    conversions: Conversions,
    matrices: Mapping[str, str],
    shape_of: Callable[[str], tuple[int, ...]],
) -> Iterator[StoredExperts]:
    """Parameters of experts with one matrix of the checkpoint per expert and projection.

    Args:
        matrices: the checkpoint's matrices by the name of the tensor that transformers would load.
        shape_of: shape of a matrix.
    """
    from transformers.core_model_loading import dot_natural_key

    found: dict[str, dict[str, list[str]]] = {}
    for key in sorted(matrices, key=dot_natural_key):  # the order in which transformers stacks experts
        parameter, pattern = conversions.find(key)
        if pattern:
            found.setdefault(parameter, {}).setdefault(pattern, []).append(key)
    for module_name, module in expert_modules(model):
        for name in (GATE_UP, UP, DOWN):
            parameter = f"{module_name}.{name}"
            if module.is_transposed or not module.is_concatenated or parameter not in found:
                continue
            projections, by_pattern = (GATE, UP) if name == GATE_UP else (name,), found[parameter]
            patterns = conversions.stacked_patterns(next(iter(by_pattern)))
            experts, outputs, inputs = getattr(module, name).shape
            shape = outputs // len(projections), inputs
            keys = [by_pattern.get(pattern, []) for pattern in patterns]
            if len(keys) != len(projections) or any(len(each) != experts for each in keys):
                continue
            if any(shape_of(matrices[key]) != shape for each in keys for key in each):
                continue
            if conversions.parameter_of(parameter) == parameter:
                names = {each: [matrices[key] for key in of] for each, of in zip(projections, keys, strict=True)}
                yield StoredExperts(module_name, parameter, names, frozenset(key for each in keys for key in each))
