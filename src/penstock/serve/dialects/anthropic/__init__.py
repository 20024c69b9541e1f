"""Anthropic's dialect: messages, whole and streamed, and how many tokens they have."""

from .routes import add_routes, error_format_of
