"""Sources of weights: checkpoints, the cache of packed weights, LoRA adapters, and dummy weights."""

from .cache import WeightCache
from .cache_folder import cache_folder
from .checkpoint import Checkpoint
from .dummy import DummyWeights
from .lora import LoRAAdapter, load_lora

__all__ = ["Checkpoint", "DummyWeights", "LoRAAdapter", "WeightCache", "cache_folder", "load_lora"]
