"""OpenAI's dialect: completions, chat, models, and vLLM's additions to them."""

from .routes import OpenAI, add_routes, shared_paths
from .schema import REQUESTS

__all__ = ["REQUESTS", "OpenAI", "add_routes", "shared_paths"]
