"""Models: families by architecture, and what computes them. Importing the package imports no torch."""

from penstock.checkpoint.model_config import ModelConfig, dense_config

from .read_config import read_config
from .registry import Family, imported, register
from .stored import Stored

__all__ = ["Family", "ModelConfig", "Stored", "dense_config", "imported", "read_config", "register"]
