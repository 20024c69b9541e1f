"""PaddleNLP's API: PaddleNLP's request format on OpenAI's paths, and PaddleNLP's gRPC model."""

from .kserve_model import PaddleNLPModel
from .routes import PaddleNLP
