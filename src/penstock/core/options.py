"""The schema of the configuration: every option with its default, unit and help, under the field's own names.

Command lines, configuration files and documentation are generated from it. Reading is done above.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from .errors import invalid


def option(help: str, unit: str = "", **bounds: Any) -> msgspec.Meta:
    """What is known of an option besides its name, type and default."""
    return msgspec.Meta(description=help, extra={"unit": unit} if unit else None, **bounds)


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs when, and how much of a step each gets."""

    max_num_seqs: Annotated[int, option("Sequences that run at the same time.", ge=1)] = 256
    max_num_batched_tokens: Annotated[int, option("Tokens computed in one step.", "tokens", ge=1)] = 2048
    max_model_len: Annotated[int, option("Prompt and output of one sequence together.", "tokens", ge=1)] = 2048
    max_waiting: Annotated[int, option("Requests that may wait; more are refused at once.", ge=0)] = 256
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], option("First come first served, or by the requests' priority (lower first).")
    ] = "fcfs"
    batch_scheduler_policy: Annotated[
        Literal["max_utilization", "guaranteed_no_evict"],
        option("Admit what fits now and preempt if it grows too much, or admit only what fits to its very end."),
    ] = "max_utilization"
    preemption_mode: Annotated[
        Literal["recompute", "swap"],
        option("Compute a preempted sequence again, or keep its blocks in host memory while there is room."),
    ] = "recompute"
    enable_prefix_caching: Annotated[bool, option("Find computed prefixes again.")] = True
    enable_chunked_prefill: Annotated[bool, option("Split prompts that do not fit into what a step has left.")] = True
    max_num_partial_prefills: Annotated[int, option("Prompts that may be half computed at the same time.", ge=1)] = 1
    max_long_partial_prefills: Annotated[
        int, option("Of these, long ones; shorter prompts then overtake the longer.", ge=1)
    ] = 1
    long_prefill_token_threshold: Annotated[
        int, option("Prompts beyond this are long, and take no more of one step; 0 is none.", "tokens", ge=0)
    ] = 0
    kv_cache_ratio: Annotated[
        float, option("Share of the blocks that admitting prompts may fill; the rest is for growth.", gt=0, le=1)
    ] = 1.0
    static_decode_blocks: Annotated[
        int, option("Blocks a request gets for its output when it is admitted.", "blocks", ge=0)
    ] = 0

    def __post_init__(self) -> None:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise invalid(
                "max_num_batched_tokens",
                f"must be at least max_model_len ({self.max_model_len}) where chunked prefill is off",
                self.max_model_len,
            )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise invalid(
                "max_long_partial_prefills",
                f"must be at most max_num_partial_prefills ({self.max_num_partial_prefills})",
                self.max_num_partial_prefills,
            )
