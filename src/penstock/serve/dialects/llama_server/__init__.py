"""The API of llama.cpp's server (``/completion``, ``/infill``, ``/props`` …), as of late 2025."""

from .routes import add_routes
