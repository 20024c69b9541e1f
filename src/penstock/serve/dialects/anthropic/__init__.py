"""Anthropic's dialect: messages, whole and streamed, and how many tokens they have."""

from .routes import ERROR_FORMAT, SCHEMAS, add_routes, error_format_of

__all__ = ["ERROR_FORMAT", "SCHEMAS", "add_routes", "error_format_of"]
