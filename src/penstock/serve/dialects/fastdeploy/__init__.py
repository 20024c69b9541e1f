"""FastDeploy's dialect: OpenAI's paths with its own answers, and paths that only it has."""

from .dialect import NAME, FastDeploy
from .routes import add_routes
