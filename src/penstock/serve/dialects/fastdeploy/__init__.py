"""FastDeploy's dialect: OpenAI's paths with its own answers, and paths that only it has."""

from .management import add_routes
from .routes import NAME, FastDeploy
