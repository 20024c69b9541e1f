"""FastDeploy's API: OpenAI's paths with FastDeploy's responses, and FastDeploy's management endpoints."""

from .management import add_routes
from .routes import NAME, FastDeploy
