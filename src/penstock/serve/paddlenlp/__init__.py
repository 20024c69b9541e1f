"""PaddleNLP's dialect: its own fields on the paths that all chats and completions share."""

from .dialect import PaddleNLP

__all__ = ["PaddleNLP"]
