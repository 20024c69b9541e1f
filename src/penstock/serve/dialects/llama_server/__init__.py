"""The API of llama.cpp's server (``/completion``, ``/infill``, ``/props`` …), as of late 2025."""

from .responses import ERROR_FORMAT, ERROR_PATHS
from .routes import SCHEMAS, add_routes

__all__ = ["ERROR_FORMAT", "ERROR_PATHS", "SCHEMAS", "add_routes"]
