"""OpenAI's dialect: completions, chat, models, and vLLM's additions to them."""

from .routes import add_routes
from .schema import REQUESTS

__all__ = ["REQUESTS", "add_routes"]
