"""The longest inputs, run once before there are requests: what they need is then there, or the start says that it is
not."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from penstock.core import EngineRequest, PenstockError, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)


def warm_up(engine: Engine) -> None:
    """Run the longest prompt beside as many short ones as may run with it, each for two tokens where there is room.

    Raises ``PenstockError`` where a step fails.
    """
    begun, options, vocabulary = time.monotonic(), engine.scheduler.options, engine.info.vocab_size
    longest = min(options.max_model_len - 1, options.max_prompt_len or options.max_model_len)
    lengths = [longest, *[1] * (options.max_num_seqs - 1)]
    left: list[EngineRequest] = []
    for number, length in enumerate(lengths):
        tokens = min(2, options.max_model_len - length, options.max_output_len or 2)
        left.append(
            EngineRequest(
                request_id=f"warm-up-{number}",
                prompt=[i % vocabulary for i in range(length)],
                sampling=SamplingParams(temperature=1 - number % 2, max_tokens=tokens, ignore_eos=True),
                cache_salt="warm-up",
                pooling=None if engine.info.has_lm_head else PoolingParams(),
            )
        )
    while left or engine.busy:
        while left and engine.add_where_room(left[0]):
            del left[0]
        for delta in engine.step():
            if delta.failure:
                raise PenstockError.of(delta.failure)
    logger.info("warmed up with %d tokens in %.1f seconds", sum(lengths), time.monotonic() - begun)
