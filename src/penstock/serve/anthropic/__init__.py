"""Anthropic's dialect: messages, whole and streamed, and how many tokens they have."""

from .routes import SHAPE, add_routes

__all__ = ["SHAPE", "add_routes"]
