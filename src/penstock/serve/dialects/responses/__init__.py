"""OpenAI's Responses: ``/v1/responses``. Nothing is kept between requests."""

from .routes import ERROR_FORMAT, SCHEMAS, add_routes

__all__ = ["ERROR_FORMAT", "SCHEMAS", "add_routes"]
