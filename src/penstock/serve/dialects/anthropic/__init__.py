"""Anthropic's dialect: messages, whole and streamed, and how many tokens they have."""

from .routes import SCHEMAS, SHAPE, add_routes, shape_of

__all__ = ["SCHEMAS", "SHAPE", "add_routes", "shape_of"]
