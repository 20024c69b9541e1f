"""OpenAI's Responses: ``/v1/responses``. Responses and conversations are kept with ``storage_dir``."""

from .routes import ERROR_FORMAT, SCHEMAS, add_routes
from .stored import Stores

__all__ = ["ERROR_FORMAT", "SCHEMAS", "Stores", "add_routes"]
