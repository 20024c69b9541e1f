"""Creates the executor selected by the options."""

from __future__ import annotations

from penstock.config.options import EngineOptions, LogOptions
from penstock.core.errors import invalid

from .base import Executor


def start_executor(options: EngineOptions, max_in_flight: int, logs: LogOptions | None) -> Executor:
    """Create the executor selected by ``distributed_executor_backend``. Does not load the model."""
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    several = ranks > 1
    if several and options.distributed_executor_backend == "uni":
        message = f"the {ranks} ranks need worker processes: use mp or ray, not uni"
        raise invalid("distributed_executor_backend", message)
    if several and options.distributed_executor_backend == "ray":
        from .ray_executor import RayExecutor

        return RayExecutor(options, logs)
    if several or options.distributed_executor_backend == "mp":
        from .multiproc import MultiprocExecutor

        return MultiprocExecutor(options, logs)
    from .uniproc import UniProcExecutor  # this module imports PyTorch

    return UniProcExecutor(options, max_in_flight)
