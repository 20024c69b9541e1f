"""Quantized checkpoints: readers of each format, and the matrix classes that layers multiply by. The formats themselves
are defined in ``core/quantization.py``."""

from .checkpoint_format import CheckpointFormat, TensorSource
from .experts import ExpertMatrices
from .matrix import Matrix, PackedMatrix, StackedMatrix
from .quantization_config import read_quantization_config
