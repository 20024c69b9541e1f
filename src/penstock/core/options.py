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
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise invalid("long_prefill_token_threshold", "cannot be set where chunked prefill is off")
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise invalid(
                "max_long_partial_prefills",
                f"must be at most max_num_partial_prefills ({self.max_num_partial_prefills})",
                self.max_num_partial_prefills,
            )


class EngineOptions(SchedulerOptions, frozen=True, kw_only=True):
    """A model, where and in what it runs, and what its cache may take."""

    model: Annotated[str, option("Folder of a Hugging Face checkpoint; empty for the model in the box.")] = ""
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], option("How weights are read; dummy makes random ones.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], option("What is computed in; auto is the checkpoint's own.")
    ] = "auto"
    device: Annotated[str, option("cpu, cuda or cuda:N; auto is a GPU where there is one.")] = "auto"
    ops: Annotated[Literal["auto", "reference", "cpu"], option("Kernels; auto takes the fastest that run here.")] = (
        "auto"
    )
    seed: Annotated[int, option("Of random weights.")] = 0
    max_model_len: Annotated[
        int, option("Prompt and output of one sequence together; 0 is the model's own.", "tokens", ge=0)
    ] = 0
    block_size: Annotated[int, option("Tokens in a KV block.", "tokens", ge=1)] = 64
    num_gpu_blocks_override: Annotated[int, option("KV blocks, whatever the memory; 0 counts.", "blocks", ge=0)] = 0
    gpu_memory_utilization: Annotated[
        float, option("Share of a GPU's memory for weights, activations and cache together.", gt=0, le=1)
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int, option("Memory of the KV cache; 0 takes half of what is free, on a GPU what it may use.", "bytes", ge=0)
    ] = 0
    threads: Annotated[int, option("Of the CPU kernels; 0 is one a core. Results do not depend on it.", ge=0)] = 0
    drain_timeout: Annotated[
        float, option("Time that running requests get to end when the engine is stopped.", "seconds", ge=0)
    ] = 30.0
    swap_space: Annotated[
        float, option("Host memory for blocks of preempted sequences (preemption_mode swap).", "GiB", ge=0)
    ] = 4.0

    def scheduler(self, max_model_len: int) -> SchedulerOptions:
        """The scheduler's part, with the length that the model has."""
        names = msgspec.structs.fields(SchedulerOptions)
        return SchedulerOptions(**{f.name: getattr(self, f.name) for f in names} | {"max_model_len": max_model_len})

    def __post_init__(self) -> None:
        """The scheduler's options are checked once the length is known."""
