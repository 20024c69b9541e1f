"""Ollama's API (``/api/chat``, ``/api/generate``, ``/api/embed`` …), as its clients of version 0.12 use it."""

from .routes import add_routes
