"""Scales of a layer's inputs, and where their inverse is put: into the module that makes these inputs.

This is what calibration knows of families. Where a family's modules have other names, nothing is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.models import ModelConfig

NORM_BEFORE = {"self_attn.q_proj": "input_layernorm", "mlp.gate_proj": "post_attention_layernorm"}
"""The norm whose output is the input of a matrix, and of those that are merged with it."""
MATRIX_BEFORE = {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"}
"""The matrix whose outputs become the inputs of another one, each by itself but for factors that others give."""


SCALING = ("awq", "smoothquant")
"""Methods that scale inputs."""


def can_scale(config: ModelConfig) -> bool:
    """Whether a family's norms multiply the inputs of the matrices behind them, and of no others, by their weights."""
    options = config.options
    plain = options.norm.kind == "rms" and not options.norm.unit_offset and options.gated_mlp
    plain = plain and config.experts is None  # whose router reads what the norm makes, too
    return plain and options.layer_norms == LayerNorms() and not options.parallel_residual


@dataclass(frozen=True)
class Producer:
    """The module whose outputs are the inputs of some matrices.

    Attention may repeat a key-value head for several query heads: then an output becomes several inputs.
    """

    name: str
    is_norm: bool
    outputs: int
    head_dim: int = 1
    repeat: int = 1
    """Query heads of a key-value head."""

    def shrink(self, inputs: Tensor) -> Tensor:
        """The largest of the values ``[in]`` that belong to each output, ``[out]``."""
        return inputs.view(-1, self.repeat, self.head_dim).amax(1).flatten()

    def expand(self, outputs: Tensor) -> Tensor:
        """The values ``[out]`` of the outputs by input, ``[in]``."""
        heads = outputs.view(-1, 1, self.head_dim).expand(-1, self.repeat, -1)
        return heads.flatten()

    def divide(self, tensors: dict[str, Tensor], scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide the outputs by ``scales`` ``[out]``.

        Args:
            tensors: of the layer, float32, in which those of this module are replaced.
            dtype: of norms in the checkpoint, whose rounding is undone by the scales.

        Returns:
            The scales that the outputs were divided by.
        """
        key = f"{self.name}.weight"
        if self.is_norm:
            folded = (tensors[key] / scales).to(dtype).float()
            scales = torch.where(folded != 0, tensors[key] / folded, 1.0)
            tensors[key] = torch.where(folded != 0, folded, tensors[key])
            return scales
        tensors[key] = tensors[key] / scales[:, None]
        if (bias := f"{self.name}.bias") in tensors:
            tensors[bias] = tensors[bias] / scales
        return scales


def producer_of(
    names: tuple[str, ...], prefix: str, tensors: Mapping[str, Tensor], config: ModelConfig
) -> Producer | None:
    """The module whose outputs the matrices ``names`` share as their input; None where none can be scaled.

    Args:
        prefix: of the layer's names.
        tensors: of the layer.
    """
    first, inputs = names[0].removeprefix(prefix), tensors[f"{names[0]}.weight"].shape[1]
    norm, matrix = (found and f"{prefix}{found}" for found in (NORM_BEFORE.get(first), MATRIX_BEFORE.get(first)))
    if norm and f"{norm}.weight" in tensors:
        return Producer(norm, True, inputs)
    if not matrix or f"{matrix}.weight" not in tensors:
        return None
    outputs = tensors[f"{matrix}.weight"].shape[0]
    if outputs == inputs:
        return Producer(matrix, False, outputs)
    if outputs * (config.num_heads // config.num_kv_heads) == inputs:
        return Producer(matrix, False, outputs, config.checkpoint_head_dim, inputs // outputs)
    return None
