"""Batches (a file of requests in, a file of results out), for ``penstock run-batch`` and ``/v1/batches``."""
