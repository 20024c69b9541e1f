"""The parts that models are made of."""

from .context import Context, Weights
from .linear import Embedding, Linear, Reduced
from .norm import RMSNorm
from .rope import rope_table

__all__ = ["Context", "Embedding", "Linear", "RMSNorm", "Reduced", "Weights", "rope_table"]
