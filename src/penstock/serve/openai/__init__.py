"""OpenAI's dialect: completions, chat, models, and vLLM's additions to them."""

from .routes import SCHEMAS, OpenAI, add_routes, shared_paths
from .schema import REQUESTS

__all__ = ["REQUESTS", "SCHEMAS", "OpenAI", "add_routes", "shared_paths"]
