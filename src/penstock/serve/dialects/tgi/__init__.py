"""The API of Text Generation Inference (``/generate``, ``/generate_stream``, ``/info``), as of version 3."""

from .routes import add_routes
