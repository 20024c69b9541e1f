"""OpenAI's Responses: ``/v1/responses``. Nothing is kept between requests."""

from .routes import SCHEMAS, SHAPE, add_routes

__all__ = ["SCHEMAS", "SHAPE", "add_routes"]
