"""PaddleNLP's dialect: its own fields on the paths that all chats and completions share."""

from .dialect import PaddleNLP
from .kserve_model import PaddleNLPModel

__all__ = ["PaddleNLP", "PaddleNLPModel"]
