"""Memory planning: sizes of models and KV caches, from ``config.json`` and options alone. No torch."""
