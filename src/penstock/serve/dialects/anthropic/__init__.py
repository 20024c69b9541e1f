"""Anthropic's API: messages, streamed or not, and token counting."""

from .routes import add_routes, error_format_of
