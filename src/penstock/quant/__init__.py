"""Weight formats: how a matrix is packed at load, and how it multiplies. ``core/quantization.py`` names them."""

from .matrix import Matrix

__all__ = ["Matrix"]
