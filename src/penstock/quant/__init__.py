"""Weight formats: what a checkpoint gives, how it is packed once at load, how it multiplies."""

from .matrix import Matrix
from .schemes import SCHEMES, UNCHANGED, Scheme

__all__ = ["SCHEMES", "UNCHANGED", "Matrix", "Scheme"]
