"""PaddleNLP's dialect: its own fields on the shared paths, and its gRPC model."""

from .kserve_model import PaddleNLPModel
from .routes import PaddleNLP
