"""Folding of input scales (AWQ, SmoothQuant) into the module that produces the inputs.

The module names are those of Llama. Inputs of modules with other names are not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.models import ModelConfig

NORM_BEFORE = {"self_attn.q_proj": "input_layernorm", "mlp.gate_proj": "post_attention_layernorm"}
"""Matrix → norm that produces its input, and the input of the matrices that are merged with it."""
MATRIX_BEFORE = {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"}
"""Matrix → matrix that produces its inputs, up to multiplication by attention weights or gates."""
SCALING = ("awq", "smoothquant")
"""Quantization methods that scale inputs."""


def can_scale(config: ModelConfig) -> bool:
    """True if the norm weights of a family scale the inputs of the following matrices, and nothing else."""
    options = config.options
    is_llama_like = options.norm.kind == "rms" and not options.norm.unit_offset and options.gated_mlp
    is_llama_like = is_llama_like and config.experts is None  # the router of experts also reads the norm's output
    return is_llama_like and options.layer_norms == LayerNorms() and not options.parallel_residual


@dataclass(frozen=True)
class Producer:
    """The module that computes the shared input of one or more matrices.

    With grouped-query attention, each output of the value projection is the input for several query heads.
    """

    name: str
    is_norm: bool
    outputs: int
    head_dim: int = 1
    repeat: int = 1
    """Query heads per key-value head."""

    def shrink(self, inputs: Tensor) -> Tensor:
        """Return, for each output, the maximum of the values ``[in]`` of its inputs, ``[out]``."""
        return inputs.view(-1, self.repeat, self.head_dim).amax(1).flatten()

    def expand(self, outputs: Tensor) -> Tensor:
        """Repeat the value of each output, ``[out]``, for all its inputs, ``[in]``."""
        heads = outputs.view(-1, 1, self.head_dim).expand(-1, self.repeat, -1)
        return heads.flatten()

    def divide(self, tensors: dict[str, Tensor], scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide the outputs by ``scales`` ``[out]``.

        Args:
            tensors: tensors of the layer, float32; the tensors of this module are replaced.
            dtype: dtype of norms in the checkpoint. The returned scales compensate for rounding to this dtype.

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
    """Return the module whose outputs are the shared input of the matrices ``names``; None if the module is unknown.

    Args:
        prefix: prefix of the layer's tensor names.
        tensors: tensors of the layer.
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
