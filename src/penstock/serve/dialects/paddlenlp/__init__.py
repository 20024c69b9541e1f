"""PaddleNLP's dialect: its own fields on the shared paths, and its gRPC model."""

from .dialect import PaddleNLP
from .kserve_model import PaddleNLPModel
