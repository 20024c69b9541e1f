"""The layers that models are made of."""

from .attention import Attention, AttentionLayer, QKNormLayers
from .context import BuildContext, PackedWeights, Weights
from .linear import ColumnParallelLinear, Embedding
from .lora import LoRALayer, LoRATarget
from .mlp import MLP, GatedMLP, MLPLayer
from .moe import MixtureOfExperts
from .norm import LayerNorm, Norm, RMSNorm
from .rope import depends_on_length, rope_table

__all__ = [
    "MLP",
    "Attention",
    "AttentionLayer",
    "BuildContext",
    "ColumnParallelLinear",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "LoRALayer",
    "LoRATarget",
    "MLPLayer",
    "MixtureOfExperts",
    "Norm",
    "PackedWeights",
    "QKNormLayers",
    "RMSNorm",
    "Weights",
    "depends_on_length",
    "rope_table",
]
