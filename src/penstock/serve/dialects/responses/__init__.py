"""OpenAI's Responses: ``/v1/responses``. Responses and conversations are kept with ``storage_dir``."""

from .routes import add_routes
from .stored import Stores
