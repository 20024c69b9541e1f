"""Ollama's API (``/api/chat``, ``/api/generate``, ``/api/embed`` …), as its clients of version 0.12 use it."""

from .responses import ERROR_FORMAT
from .routes import SCHEMAS, add_routes

__all__ = ["ERROR_FORMAT", "SCHEMAS", "add_routes"]
