"""BladeLLM's dialect: OpenAI's paths, with answers and errors in a shape of its own."""

from .routes import BladeLLM

__all__ = ["BladeLLM"]
