"""Executors run the engine's workers: in the engine's process (``UniProcExecutor``) or in worker processes
(``MultiprocExecutor``)."""
