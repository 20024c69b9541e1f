"""Performance metrics of a request (``return_perf_metrics``), as in TensorRT-LLM's backend."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.frontend.outputs import RequestOutput

from ..tensors import FP32, INT32, INT64, Spec, Tensor

OUTPUTS = (
    Spec("kv_cache_alloc_new_blocks", INT32),
    Spec("kv_cache_reused_blocks", INT32),
    Spec("kv_cache_alloc_total_blocks", INT32),
    Spec("arrival_time_ns", INT64),
    Spec("first_scheduled_time_ns", INT64),
    Spec("first_token_time_ns", INT64),
    Spec("last_token_time_ns", INT64),
    Spec("acceptance_rate", FP32),
    Spec("total_accepted_draft_tokens", INT32),
    Spec("total_draft_tokens", INT32),
)
NANOSECONDS = 1e9


def perf_metrics(outputs: Sequence[RequestOutput], block_size: int, lead: tuple[int, ...]) -> list[Tensor]:
    """The metric tensors of several sequences. Each sequence has the metrics of its whole request.

    Args:
        outputs: the output of each sequence's request.
        block_size: tokens per KV block.
        lead: shape of the tensors (``GenerationModel.leading_shape``).
    """
    rows = [_metric_values(output, block_size) for output in outputs]
    return [Tensor(spec.name, spec.datatype, lead, [row[i] for row in rows]) for i, spec in enumerate(OUTPUTS)]


def _metric_values(output: RequestOutput, block_size: int) -> tuple[int | float, ...]:
    """Metric values of a request, in the order of ``OUTPUTS``. Times are on the monotonic clock, as in TensorRT-LLM.

    New blocks are the blocks of the prompt that were not in the prefix cache; total blocks are all blocks allocated so
    far.
    """
    perfs = [completion.perf for completion in output.outputs if completion.perf]
    times = output.times
    reused = output.num_cached_tokens // block_size
    prompt_blocks = -(-len(output.prompt_token_ids) // block_size)
    drafted, accepted = sum(perf.draft_tokens for perf in perfs), sum(perf.accepted_tokens for perf in perfs)
    scheduled = min([perf.first_scheduled for perf in perfs], default=times.arrived + times.queued)
    return (
        prompt_blocks - reused,
        reused,
        sum(perf.allocated_blocks for perf in perfs),
        int(times.arrived * NANOSECONDS),
        int(scheduled * NANOSECONDS),
        int((times.first_token or times.arrived) * NANOSECONDS),
        int((times.last_token or times.arrived) * NANOSECONDS),
        accepted / drafted if drafted else 0.0,
        accepted,
        drafted,
    )
