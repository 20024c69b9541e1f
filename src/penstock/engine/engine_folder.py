"""Building engine folders (``checkpoint/engine_config.py``): a model's weights, packed for the kernels."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from penstock import demo, ops
from penstock.checkpoint.checkpoint_digest import checkpoint_digest
from penstock.checkpoint.engine_config import KEY, EngineConfig, engine_config_of, rank_folder, read_engine_config
from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.models import ModelConfig, read_config
from penstock.models.loader import LoadOptions, compute_dtype, load_model
from penstock.models.output_folder import OutputFolder
from penstock.models.weights import Checkpoint, EngineOutput
from penstock.parallel import SingleRank, shard_heads
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import size_of
from penstock.planning.pipeline import split_layers
from penstock.version import __version__

from .worker.loading import device_of

Progress = Callable[[int, int], None]
"""Callback with the number of bytes packed so far, and the approximate total."""
PROGRESS_INTERVAL = 0.2
"""Seconds between two calls of ``Progress`` if worker processes pack the ranks."""


class RankJob(NamedTuple):
    """Arguments for packing one rank."""

    folder: Path
    """Folder of the checkpoint."""
    output: Path
    """Engine folder to write."""
    config: EngineConfig
    options: EngineOptions
    rank: int
    """Global rank: pipeline stage * tensor_parallel_size + rank within the stage."""


def build_engine(
    options: EngineOptions,
    output: Path,
    *,
    recorded: Mapping[str, int | str] | None = None,
    notes: Mapping[str, Any] | None = None,
    workers: int = 1,
    max_shard_size: int = 2**30,
    progress: Progress = lambda done, total: None,
) -> EngineConfig:
    """Build an engine folder from the checkpoint of ``options.model``, for the options' kernels, formats and ranks.

    The same arguments give the same bytes. A later call continues a build that was killed.

    Args:
        recorded: options of ``planning.engine_config.RECORDED`` that servers use as defaults.
        notes: additional entries of ``config.json``.
        workers: number of processes that pack ranks in parallel.
        max_shard_size: approximate maximum bytes of a file. A worker needs this much memory plus the largest matrix.

    Raises ``PenstockError`` if the options, the checkpoint or the folder cannot be used.
    """
    folder = Path(options.model) if options.model else demo.CHAT
    model = read_config(folder)
    if engine_config_of(model.raw, folder):
        raise invalid("model", f"{folder} is an engine folder already: name the checkpoint that it was built from")
    if model.has_vision:
        raise PenstockError(Code.UNSUPPORTED, "model: engine folders do not support models with image input", "model")
    if model.speech:
        raise PenstockError(Code.UNSUPPORTED, "model: engine folders do not support speech-to-text models", "model")
    if options.max_model_len > model.max_model_len:
        message = f"must be at most {model.max_model_len}, the model's context length; is {options.max_model_len}"
        raise invalid("max_model_len", message, model.max_model_len)
    if options.quantization == "none":
        options = msgspec.structs.replace(options, quantization=model.quantization)
    device, ranks = device_of(options.device), options.tensor_parallel_size
    for kv_heads in model.kv_head_counts:
        shard_heads(SingleRank(size=ranks), model.num_heads, kv_heads)  # raises for a wrong number of ranks
    size, stages = size_of(model), (options.pipeline_parallel_size, options.pipeline_parallel_layers)
    dtype = compute_dtype(model, None if options.dtype == "auto" else getattr(torch, options.dtype), device)
    config = EngineConfig(
        producer=__version__,
        layout=ops.backend(device, options.ops, options.batch_invariant).LAYOUT,
        weights_version=checkpoint_digest(folder),
        checkpoint=str(folder.resolve()),
        dtype=str(dtype).removeprefix("torch."),
        quantization=options.quantization,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=options.pipeline_parallel_size,
        layers=tuple(map(len, split_layers(size, *stages, options.quantization, options.dtype))),
        mtp=options.pipeline_parallel_size == 1 and _has_mtp(folder, model),  # MTP runs without pipeline stages only
        max_shard_size=max_shard_size,
        options=dict(recorded or {}),
    )
    text = json.dumps({**model.raw, **(notes or {}), KEY: msgspec.to_builtins(config)}, indent=2, ensure_ascii=False)
    jobs = [RankJob(folder, output, config, options, rank) for rank in range(config.world_size)]
    names = {rank_folder(output, job.rank).name for job in jobs}
    total = weight_bytes(size, config.quantization, config.dtype, mtp=config.mtp)
    with OutputFolder(output, folder, text + "\n", lambda path: read_engine_config(path) is not None).filling(names):
        if min(workers, len(jobs)) > 1:
            _build_in_processes(jobs, min(workers, len(jobs)), lambda done: progress(done, total))
        else:
            done = 0

            def add(size: int) -> None:
                nonlocal done
                progress(done := done + size, total)

            for job in jobs:
                build_rank(job, add)
    return config


def build_rank(job: RankJob, progress: Callable[[int], None], threads: int = 0) -> None:
    """Pack and write one rank's weights.

    Args:
        progress: called with the number of bytes just packed, or found from an earlier build.
        threads: number of kernel threads; 0 for the options' number.
    """
    config, options = job.config, job.options
    stage, rank = divmod(job.rank, config.tensor_parallel_size)
    first = sum(config.layers[:stage])
    device, model = device_of(options.device), read_config(job.folder)
    backend = ops.backend(device, options.ops, options.batch_invariant)
    backend.set_threads(threads or options.threads)
    with ExitStack() as stack:

        def output(weights: Any) -> EngineOutput:
            engine_output = EngineOutput(job.output, config, job.rank, weights, progress)
            stack.enter_context(engine_output.writing())
            return engine_output

        loading = LoadOptions(
            dtype=getattr(torch, config.dtype),
            device=device,
            max_len=1,  # length of the rotary tables, which are not stored in the folder: each start computes them
            quantization=config.quantization,
            mtp_heads=config.mtp,
            group=SingleRank(rank, config.tensor_parallel_size),
            layers=range(first, first + config.layers[stage]) if len(config.layers) > 1 else None,
        )
        load_model(job.folder, backend, loading, model, output)


def _has_mtp(folder: Path, model: ModelConfig) -> bool:
    """True if the checkpoint contains the model's multi-token prediction layers; some omit them."""
    name = f"model.layers.{model.num_layers}.enorm.weight"
    return model.num_mtp_layers > 0 and Checkpoint(folder).has(name)


def _build_in_processes(jobs: list[RankJob], workers: int, progress: Callable[[int], None]) -> None:
    """Build the ranks in ``workers`` processes. ``progress`` gets the total number of bytes packed so far."""
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    threads, others = max(len(os.sched_getaffinity(0)) // workers, 1), multiprocessing.active_children()
    with ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(), done, threads)) as pool:
        futures = [pool.submit(_build_rank, job) for job in jobs]
        try:
            while wait(futures, PROGRESS_INTERVAL, FIRST_EXCEPTION).not_done:
                progress(done.value)
                if any(future.done() and future.exception() for future in futures):
                    break
            for future in futures:
                if future.done():
                    future.result()
        except BrokenProcessPool as error:
            message = "a worker process was killed, perhaps out of memory: run the same command with fewer --workers"
            raise PenstockError(Code.UNAVAILABLE, message) from error
        finally:
            if not all(future.done() for future in futures):  # an error, or Ctrl-C: kill the remaining workers
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.kill()
    progress(done.value)


_progress: Callable[[int], None]
"""``progress`` of ``build_rank`` in a worker process."""
_threads: int
"""``threads`` of ``build_rank`` in a worker process."""


def _start_worker(parent: int, done: Any, threads: int) -> None:
    """Initialize a worker process, which adds the bytes that it packs to the shared counter ``done``."""
    global _progress, _threads
    from .service.server import kill_with_parent

    kill_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it

    def add(size: int) -> None:
        with done.get_lock():
            done.value += size

    _progress, _threads = add, threads


def _build_rank(job: RankJob) -> None:
    build_rank(job, _progress, _threads)
