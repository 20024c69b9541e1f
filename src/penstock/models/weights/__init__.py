"""Sources of weights: checkpoints, weight cache, engine folders, LoRA adapters, and dummy weights."""

from .cache import WeightCache
from .checkpoint import Checkpoint, tied_embedding
from .dummy import DummyWeights
from .engine_output import EngineOutput
from .engine_weights import EngineWeights
from .fused_experts import FusedExperts
from .gguf import GGUFCheckpoint, find_gguf
from .lora import LoRAAdapter, load_lora
from .padded_heads import PaddedHeads
from .renamed import RenamedWeights
