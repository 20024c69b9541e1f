"""The server: one engine behind HTTP."""
