"""The parts that models are made of."""

from .adapted import Adapted, Target
from .context import Context, Weights
from .linear import Embedding, Linear, Reduced
from .norm import RMSNorm
from .rope import rope_table

__all__ = ["Adapted", "Context", "Embedding", "Linear", "RMSNorm", "Reduced", "Target", "Weights", "rope_table"]
