"""Executors run the engine's workers: in the engine's process (``UniProcExecutor``), in worker processes
(``MultiprocExecutor``), or on a Ray cluster (``RayExecutor``)."""
