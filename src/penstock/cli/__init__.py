"""The commands of ``penstock``."""
