"""The API of Text Generation Inference (``/generate``, ``/generate_stream``, ``/info``), as of version 3."""

from .responses import ERROR_FORMAT, ERROR_PATHS
from .routes import SCHEMAS, add_routes

__all__ = ["ERROR_FORMAT", "ERROR_PATHS", "SCHEMAS", "add_routes"]
