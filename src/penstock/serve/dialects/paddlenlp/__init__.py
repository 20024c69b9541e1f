"""PaddleNLP's API: its request format on OpenAI's paths, and its gRPC model."""

from .kserve_model import PaddleNLPModel
from .routes import PaddleNLP
