"""The API of Text Generation Inference 3 (``/generate``, ``/generate_stream``, ``/info``)."""

from .routes import add_routes
