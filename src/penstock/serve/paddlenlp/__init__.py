"""PaddleNLP's dialect: its own fields on the paths that all chats and completions share."""

from .dialect import PaddleNLP
from .over_grpc import OverGrpc

__all__ = ["OverGrpc", "PaddleNLP"]
