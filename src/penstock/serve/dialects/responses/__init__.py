"""OpenAI's Responses and Conversations APIs. Responses and conversations are stored if ``storage_dir`` is set."""

from .background import Background
from .routes import add_routes
from .stored import Stores
