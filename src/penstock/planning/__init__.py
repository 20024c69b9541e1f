"""Memory planning: sizes of models and KV caches, computed from ``config.json`` and options. Imports no torch."""
