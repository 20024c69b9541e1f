"""Validation of options and requests against the model, before the engine starts and before a request is queued."""
