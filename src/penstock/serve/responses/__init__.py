"""OpenAI's Responses: ``/v1/responses``. Nothing is kept between requests."""

from .routes import SHAPE, add_routes

__all__ = ["SHAPE", "add_routes"]
