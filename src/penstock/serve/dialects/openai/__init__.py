"""OpenAI's dialect: completions, chat, models, and vLLM's additions to them."""

from .requests import REQUESTS
from .routes import OpenAI, add_routes, shared_paths
