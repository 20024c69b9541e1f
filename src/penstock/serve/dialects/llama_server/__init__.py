"""The API of llama.cpp's server of late 2025 (``/completion``, ``/infill``, ``/props`` …)."""

from .routes import add_routes
