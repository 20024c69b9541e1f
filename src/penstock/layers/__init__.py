"""The layers that models are made of."""

from .attention import Attention, AttentionLayer
from .context import BuildContext, PackedWeights, Weights
from .latent_attention import LatentAttention
from .linear import ColumnParallelLinear, Embedding
from .lora import LoRALayer, LoRATarget
from .mlp import GatedMLP, MLPLayer
from .norm import RMSNorm
from .rope import depends_on_length, rope_table

__all__ = [
    "Attention",
    "AttentionLayer",
    "BuildContext",
    "ColumnParallelLinear",
    "Embedding",
    "GatedMLP",
    "LatentAttention",
    "LoRALayer",
    "LoRATarget",
    "MLPLayer",
    "PackedWeights",
    "RMSNorm",
    "Weights",
    "depends_on_length",
    "rope_table",
]
