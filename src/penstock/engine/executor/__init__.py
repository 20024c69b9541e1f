"""Executors, which run the engine's workers: in its own process (``UniProcExecutor``) or in others
(``MultiprocExecutor``)."""
