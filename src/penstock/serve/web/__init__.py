"""The web page at ``/``: a playground and a live view."""

from .routes import PAGE_PATHS, add_routes
