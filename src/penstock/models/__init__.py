"""Models: families of architectures, and their implementations. Importing the package does not import torch."""

from penstock.checkpoint.decoder_options import DecoderOptions
from penstock.checkpoint.experts_config import ExpertsConfig
from penstock.checkpoint.latent_config import LatentConfig
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of

from .read_config import read_config
from .registry import Family, imported, register
from .stored import Stored

__all__ = [
    "ConfigJson",
    "DecoderOptions",
    "ExpertsConfig",
    "Family",
    "LatentConfig",
    "ModelConfig",
    "Stored",
    "dense_config",
    "imported",
    "options_of",
    "read_config",
    "register",
]
