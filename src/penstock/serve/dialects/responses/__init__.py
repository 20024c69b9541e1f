"""OpenAI's Responses: ``/v1/responses``. Responses are kept with ``storage_dir``."""

from .routes import ERROR_FORMAT, SCHEMAS, add_routes

__all__ = ["ERROR_FORMAT", "SCHEMAS", "add_routes"]
