"""Ollama's API (``/api/chat``, ``/api/generate``, ``/api/embed`` …), for clients of version 0.12."""

from .routes import add_routes
