"""Weight formats: how checkpoints have a matrix, how it is packed at load, and how it multiplies.
``core/quantization.py`` names them."""

from .checkpoint_format import CheckpointFormat, TensorSource, read_quantization_config
from .matrix import Matrix, PackedMatrix, StackedMatrix

__all__ = [
    "CheckpointFormat",
    "Matrix",
    "PackedMatrix",
    "StackedMatrix",
    "TensorSource",
    "read_quantization_config",
]
