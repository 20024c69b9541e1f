"""OpenAI's dialect: completions, chat, models, and vLLM's additions to them."""

from .routes import REQUESTS, OpenAI, add_routes, shared_paths
