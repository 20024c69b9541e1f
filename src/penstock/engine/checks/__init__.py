"""Checks before a start and before a request is queued: options and requests that a model cannot run."""
