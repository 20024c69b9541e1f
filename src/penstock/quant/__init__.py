"""Weight formats: how checkpoints have a matrix, how it is packed at load, and how it multiplies.
``core/quantization.py`` names them."""

from .checkpoint_format import CheckpointFormat, TensorSource
from .experts import ExpertMatrices
from .matrix import Matrix, PackedMatrix, StackedMatrix
from .quantization_config import read_quantization_config
