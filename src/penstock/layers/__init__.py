"""Layers of models: attention, MLP, mixture of experts, norms, embeddings, LoRA."""

from .attention import Attention, AttentionLayer, QKNormLayers, SharedKVAttention
from .compressed_attention import CompressedAttention
from .context import BuildContext, BuildOptions, PackedWeights, Weights
from .encoder import BidirectionalAttention
from .expert_load import ExpertLoad
from .gated_convolution import GatedConvolution
from .gated_delta_net import GatedDeltaNet
from .hyper_connections import StreamWeights
from .kimi_delta import KimiDeltaAttention
from .latent_attention import LatentAttention
from .lightning import LightningAttention
from .linear import ColumnParallelLinear, Embedding
from .lora import LoRALayer, LoRATarget
from .mamba import Mamba
from .mamba2 import Mamba2Mixer
from .mlp import MLP, GatedMLP, MLPLayer, ScaledGatedMLP
from .moe import LatentProjections, MixtureOfExperts
from .norm import LayerNorm, Norm, RMSNorm
from .pooler import PoolerHead
from .rg_lru import RGLRU
from .rope import depends_on_length, rope_table
from .state import HasState, StateLayer, new_state_cache
