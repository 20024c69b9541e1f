"""The processes of a server: supervisor, engines, API processes."""
