"""The version of this installation, which ``pyproject.toml`` reads."""

__version__ = "0.0.1"
