"""The layers that models are made of."""

from .attention import Attention, AttentionLayer
from .context import BuildContext, PackedWeights, Weights
from .linear import ColumnParallelLinear, Embedding
from .lora import LoRALayer, LoRATarget
from .mlp import GatedMLP, MLPLayer
from .moe import MixtureOfExperts
from .norm import RMSNorm
from .rope import depends_on_length, rope_table

__all__ = [
    "Attention",
    "AttentionLayer",
    "BuildContext",
    "ColumnParallelLinear",
    "Embedding",
    "GatedMLP",
    "LoRALayer",
    "LoRATarget",
    "MLPLayer",
    "MixtureOfExperts",
    "PackedWeights",
    "RMSNorm",
    "Weights",
    "depends_on_length",
    "rope_table",
]
