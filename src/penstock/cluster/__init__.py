"""Several instances: rank tables."""
