"""Builds engine folders (``checkpoint/engine_config.py``): packs a model's weights once, for any number of starts."""

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
"""Called with the bytes that are packed so far, and those of all, about."""
POLL = 0.2
"""Seconds between two calls of it."""


class RankJob(NamedTuple):
    """What a worker needs to build a rank."""

    folder: Path
    output: Path
    config: EngineConfig
    options: EngineOptions
    rank: int
    """Number of its folder."""


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
    """Build an engine folder of the checkpoint that the options name, for their kernels, formats and ranks.

    The same arguments give the same bytes, also after a build that was killed, which is gone on with.

    Args:
        recorded: options of ``planning.engine_config.RECORDED`` that are to be the defaults of servers.
        notes: further entries of ``config.json``.
        workers: processes that pack ranks at the same time.
        max_shard_size: bytes of a file, about; a worker needs as much memory, and that of the largest matrix.

    Raises ``PenstockError`` with one sentence if options, checkpoint or folder do not allow it.
    """
    folder = Path(options.model) if options.model else demo.CHAT
    model = read_config(folder)
    if engine_config_of(model.raw, folder):
        raise invalid("model", f"{folder} is an engine folder already: name the checkpoint that it was built from")
    if model.has_vision:
        raise PenstockError(Code.UNSUPPORTED, "model: engine folders of models that see images are not built", "model")
    if model.speech:
        message = "model: engine folders of models that transcribe audio are not built"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if options.max_model_len > model.max_model_len:
        message = f"is {options.max_model_len}, and this model has a context of {model.max_model_len} tokens"
        raise invalid("max_model_len", message, model.max_model_len)
    if options.quantization == "none":
        options = msgspec.structs.replace(options, quantization=model.quantization)
    device, ranks = device_of(options.device), options.tensor_parallel_size
    shard_heads(SingleRank(size=ranks), model.num_heads, model.num_kv_heads)  # refuses what cannot be shared
    size, asked = size_of(model), (options.pipeline_parallel_size, options.pipeline_parallel_layers)
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
        layers=tuple(map(len, split_layers(size, *asked, options.quantization, options.dtype))),
        mtp=options.pipeline_parallel_size == 1 and _has_mtp(folder, model),  # pipeline stages have none
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
        progress: called with the bytes that were packed, or found.
        threads: of the kernels; 0 is as the options say.
    """
    config, options = job.config, job.options
    stage, rank = divmod(job.rank, config.tensor_parallel_size)
    first = sum(config.layers[:stage])
    device, model = device_of(options.device), read_config(job.folder)
    backend = ops.backend(device, options.ops, options.batch_invariant)
    backend.set_threads(threads or options.threads)
    with ExitStack() as stack:

        def output(weights: Any) -> EngineOutput:
            made = EngineOutput(job.output, config, job.rank, weights, progress)
            stack.enter_context(made.writing())
            return made

        loading = LoadOptions(
            dtype=getattr(torch, config.dtype),
            device=device,
            max_len=1,  # of tables that are made at each start
            quantization=config.quantization,
            mtp_heads=config.mtp,
            group=SingleRank(rank, config.tensor_parallel_size),
            layers=range(first, first + config.layers[stage]) if len(config.layers) > 1 else None,
        )
        load_model(job.folder, backend, loading, model, output)


def _has_mtp(folder: Path, model: ModelConfig) -> bool:
    """True if the checkpoint has its layers for multi-token prediction: some leave them out."""
    name = f"model.layers.{model.num_layers}.enorm.weight"
    return model.num_mtp_layers > 0 and Checkpoint(folder).has(name)


def _build_in_processes(jobs: list[RankJob], workers: int, progress: Callable[[int], None]) -> None:
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    threads, others = max(len(os.sched_getaffinity(0)) // workers, 1), multiprocessing.active_children()
    with ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(), done, threads)) as pool:
        futures = [pool.submit(_work, job) for job in jobs]
        try:
            while wait(futures, POLL, FIRST_EXCEPTION).not_done:
                progress(done.value)
                if any(future.done() and future.exception() for future in futures):
                    break
            for future in futures:
                if future.done():
                    future.result()
        except BrokenProcessPool as error:
            message = "a worker process was killed, perhaps as memory ran out: run the same command again"
            raise PenstockError(Code.UNAVAILABLE, f"{message}, with fewer --workers") from error
        finally:
            if not all(future.done() for future in futures):  # an error, or Ctrl-C: nobody waits for the others
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.kill()
    progress(done.value)


_progress: Callable[[int], None]
_threads: int


def _start_worker(parent: int, done: Any, threads: int) -> None:
    global _progress, _threads
    from .service.server import kill_with_parent

    kill_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it

    def add(size: int) -> None:
        with done.get_lock():
            done.value += size

    _progress, _threads = add, threads


def _work(job: RankJob) -> None:
    build_rank(job, _progress, _threads)
