"""Commands of ``penstock``."""
