"""Warm-up with the largest inputs before requests are accepted, so that a lack of memory is found at the start."""

from __future__ import annotations

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest, PoolingParams, SamplingParams

from .step import ModelInfo


def warm_up_requests(options: SchedulerOptions, info: ModelInfo) -> list[EngineRequest]:
    """Requests of the warm-up, ``max_num_seqs`` in total: one with the longest prompt, the others with one token. Each
    generates two tokens if the limits allow."""
    max_len = min(options.max_model_len - 1, options.max_prompt_len or options.max_model_len)
    return [
        EngineRequest(
            request_id=f"warm-up-{number}",
            prompt=[i % info.vocab_size for i in range(length)],
            sampling=SamplingParams(
                temperature=1 - number % 2,
                max_tokens=min(2, options.max_model_len - length, options.max_output_len or 2),
                ignore_eos=True,
            ),
            cache_salt="warm-up",
            pooling=None if info.has_lm_head else PoolingParams(),
        )
        for number, length in enumerate([max_len, *[1] * (options.max_num_seqs - 1)])
    ]
