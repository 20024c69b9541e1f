"""Quantized checkpoints: a reader for each checkpoint format, and the matrix classes of layers. ``Format`` is defined
in ``core/quantization.py``."""

from .checkpoint_format import CheckpointFormat, StackedSource, TensorSource
from .experts import ExpertMatrices
from .matrix import Matrix, PackedMatrix, StackedMatrix
from .quantization_config import read_quantization_config
