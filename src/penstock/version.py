"""Version of the package, read by ``pyproject.toml``."""

__version__ = "0.0.1"
