"""BladeLLM's API: OpenAI's paths with BladeLLM's response and error formats."""

from .routes import BladeLLM
