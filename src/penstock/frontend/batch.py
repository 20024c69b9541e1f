"""Running a batch of requests on an engine in this process, with a progress bar."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.engine import Engine

from .arguments import described
from .output_processor import OutputProcessor
from .outputs import RequestOutput

UseTqdm = bool | Callable[..., Any]
"""Show a progress bar; a function creates it, such as ``functools.partial(tqdm, leave=False)``."""


class Progress:
    """Progress bar of a batch: finished requests, and rates of input and output tokens."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            message = f"must be True, False, or a function that creates a progress bar, is {described(use_tqdm)}"
            raise invalid("use_tqdm", message)
        create = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = create(total=total, desc="requests", unit="request", disable=not use_tqdm)
        self._begun = time.monotonic()
        self._tokens = {"input": 0, "output": 0}

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self._tokens["input"] += len(output.prompt_token_ids)
        self._tokens["output"] += sum(len(one.token_ids) for one in output.outputs)
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rates = [f"{name}: {count / seconds:.2f} tokens/s" for name, count in self._tokens.items()]
        self._bar.set_postfix_str(", ".join(rates), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


def run_batch(
    engine: Engine,
    processors: Sequence[OutputProcessor],
    use_tqdm: UseTqdm,
    on_finished: Callable[[RequestOutput], None],
) -> list[RequestOutput]:
    """Run requests until all are finished. An exception, such as ``KeyboardInterrupt``, aborts them.

    Args:
        on_finished: called with each finished output.

    Raises ``PenstockError`` (``unavailable``) if the engine is asleep.
    """
    if engine.sleeper.is_paused:
        raise PenstockError(Code.UNAVAILABLE, "the engine is asleep; call wake_up first")
    by_id = {processor.output.request_id: processor for processor in processors}
    remaining = iter(processors)
    following = next(remaining, None)
    progress = Progress(len(processors), use_tqdm)
    collecting = gc.get_freeze_count() == 0
    if collecting:
        gc.freeze()  # exclude long-lived objects from garbage collection
    try:
        while following or engine.busy:
            while following and engine.try_add(following.request):
                following = next(remaining, None)
            for output in step(engine, by_id):
                if output.finished:
                    progress.add(output)
                    on_finished(output)
    finally:
        if collecting:
            gc.unfreeze()
        progress.close()
        for request_id, processor in by_id.items():
            if not processor.output.finished:
                engine.abort(request_id)
    return [processor.output for processor in processors]


def step(engine: Engine, processors: dict[str, OutputProcessor]) -> list[RequestOutput]:
    """Compute a step. Returns the outputs that it has changed.

    Args:
        processors: processors of the open requests by id.
    """
    changed = {}
    for delta in engine.step():
        processor = processors[delta.request_id]
        if not processor.output.finished:
            changed[delta.request_id] = processor.output
        processor.output.add_weights(engine.info.weights_version)
        if processor.add(delta) is not None:
            engine.finish_sequence(delta.request_id, delta.sequence)
    return list(changed.values())
