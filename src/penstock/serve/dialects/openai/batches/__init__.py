"""Batches: a file of requests, answered into another file; for ``penstock run-batch`` and ``/v1/batches``."""
