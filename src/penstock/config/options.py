"""The options: every one with its type, default, unit and help, under the names that vLLM and others use.

Flags, configuration files and their documentation are generated from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.core.errors import PenstockError, invalid
from penstock.core.quantization import QuantizationName
from penstock.core.sampling import MAX_LOGPROBS, MAX_SEQUENCES, SamplingParams

from .storage_limits import storage_limits

MAX_MEDIA = {"image": 16, "video": 4}
"""Images and videos that a prompt may have by default."""


def option(help: str, unit: str = "", empty: str = "", **bounds: Any) -> msgspec.Meta:
    """Help, unit and bounds of an option.

    Args:
        empty: meaning of an empty value, for the help.
    """
    return msgspec.Meta(description=help, extra={"unit": unit, "empty": empty}, **bounds)


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
            "Folder of a Hugging Face checkpoint, a GGUF file, or a name on the hub; nothing for the built-in model."
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
        Literal["auto", "llguidance", "xgrammar", "off"],
        option("Backend of guided decoding; off refuses guided requests."),
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


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a model beside its engine: tokenizer, chat template, parsers, default sampling parameters,
    download."""

    pooling_type: Annotated[
        Literal["auto", "last", "cls", "mean", "all"],
        option(
            "Hidden state that becomes an embedding, or goes into a classifier: the last or first (cls) token's, the "
            "mean, or one for each token (all); auto is what the checkpoint says, else of decoders last and of "
            "encoders cls."
        ),
    ] = "auto"
    pooling_task: Annotated[
        Literal["auto", "embed", "classify", "score"],
        option(
            "What is pooled for: auto is classes and scores where the checkpoint has a classifier, else embeddings; "
            "classify and score have a model that generates answer with one of classifier_tokens, as Qwen3-Reranker."
        ),
    ] = "auto"
    pooling_activation: Annotated[
        Literal["auto", "on", "off"],
        option(
            "Whether embeddings have length 1, and a classifier's outputs become probabilities; auto is what the "
            "checkpoint says."
        ),
    ] = "auto"
    classifier_tokens: Annotated[
        tuple[str, ...], option("Tokens by which a model that generates says no and yes to a pair of texts.")
    ] = ("no", "yes")
    tokenizer: Annotated[str, option("Folder to take the tokenizer from; nothing for the model's own.")] = ""
    chat_template: Annotated[str, option("File with a template, or the template; nothing for the model's own.")] = ""
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "qwen",
            "ernie",
            "llama3_json",
            "llama4_json",
            "mistral",
            "deepseek_v3",
            "deepseek_v31",
            "kimi_k2",
            "granite",
            "granite4",
            "phi4_mini_json",
            "hunyuan_a13b",
            "jamba",
            "cohere_command3",
            "internlm",
            "qwen3_coder",
            "qwen3_xml",
            "mimo",
            "seed_oss",
            "minimax_m2",
            "glm45",
            "glm47",
            "pythonic",
            "llama4_pythonic",
            "olmo3",
            "lfm2",
            "openai",
        ],
        option("Format of the model's tool calls; auto is the one that its chat template has."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "qwen3",
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "glm47",
            "kimi_k2",
            "minimax_m2",
            "mimo",
            "olmo3",
            "step3",
            "mistral",
            "ernie",
            "hunyuan_a13b",
            "cohere_command3",
            "seed_oss",
            "granite",
            "openai_gptoss",
        ],
        option(
            "Format of the model's reasoning, which is separated from its answers; auto is the one that its chat "
            "template has, none leaves it in the content."
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        option(
            "Default sampling parameters of requests: auto is the model's generation_config.json, vllm is vLLM's "
            "defaults, else a folder with another generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        option('Default sampling parameters that override those of generation_config, as JSON: {"temperature": 0.6}.'),
    ] = ""
    max_logprobs: Annotated[int, option("Maximum logprobs of a request.", ge=0, le=MAX_LOGPROBS)] = MAX_LOGPROBS
    enable_logprob: Annotated[bool, option("Return logprobs; without it, requests for them are refused.")] = True
    limit_mm_per_prompt: Annotated[
        str,
        option('Images and videos that a prompt may have, as JSON: {"image": 4}.', empty='{"image": 16, "video": 4}'),
    ] = ""
    mm_processor_kwargs: Annotated[
        str,
        option(
            "Limits of the pixels of an image once it is resized, in place of those of the model's image processor, as "
            'JSON: {"min_pixels": 3136, "max_pixels": 1003520}; of videos also which frames are taken: fps or '
            "num_frames, min_frames, max_frames.",
            empty="the model's",
        ),
    ] = ""
    media_io_kwargs: Annotated[
        str,
        option(
            'Which frames of videos are taken, as JSON: {"video": {"num_frames": 32}}, or fps; -1 is all.',
            empty="the model's",
        ),
    ] = ""
    allowed_media_domains: Annotated[
        tuple[str, ...],
        option(
            "The only hosts that images are fetched from, which may then have any address; nothing for all hosts with "
            "public addresses.",
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        str, option("Folder whose files requests may name as images (file:); nothing for none.")
    ] = ""
    max_image_size: Annotated[int, option("Maximum size of an image's file.", "bytes", ge=1)] = 20 * 2**20
    max_image_pixels: Annotated[
        int, option("Maximum width times height of an image, before and after it is resized.", "pixels", ge=1)
    ] = 2**26
    media_timeout: Annotated[float, option("Maximum time to fetch an image or a video.", "seconds", gt=0)] = 10.0
    max_video_size: Annotated[int, option("Maximum size of a video's file.", "bytes", ge=1)] = 100 * 2**20
    max_video_frames: Annotated[int, option("Maximum number of frames taken of a video.", "frames", ge=1)] = 768
    max_video_pixels: Annotated[
        int, option("Maximum width times height times frames of a video, after these are resized.", "pixels", ge=1)
    ] = 2**27
    video_timeout: Annotated[float, option("Maximum time to decode a video.", "seconds", gt=0)] = 30.0
    max_audio_size: Annotated[int, option("Maximum size of an audio file.", "bytes", ge=1)] = 25 * 2**20
    max_audio_duration: Annotated[float, option("Maximum duration of audio.", "seconds", gt=0)] = 3600.0
    audio_timeout: Annotated[float, option("Maximum time to decode audio.", "seconds", gt=0)] = 30.0
    model_hub: Annotated[Literal["huggingface", "modelscope"], option("Hub of models that are named org/name.")] = (
        "huggingface"
    )
    revision: Annotated[str, option("Branch, tag or commit on the hub; nothing for its main branch.")] = ""
    hf_token: Annotated[str, option("Token for the Hugging Face hub; nothing for the environment's HF_TOKEN.")] = ""
    download_dir: Annotated[
        str,
        option(
            "Where downloads are kept; nothing for Hugging Face's own cache, and ~/.cache/penstock/downloads for what "
            "is not from its hub."
        ),
    ] = ""

    def __post_init__(self) -> None:
        self.sampling()
        self.max_media("image")
        self.media_kwargs()

    def sampling(self) -> dict[str, Any]:
        """``override_generation_config`` by field. Raises ``PenstockError`` (``invalid``) where it is wrong."""
        if not self.override_generation_config:
            return {}
        try:
            result = msgspec.json.decode(self.override_generation_config, type=dict[str, Any])
            SamplingParams(**result)
        except (msgspec.MsgspecError, TypeError, PenstockError) as error:
            raise invalid(
                "override_generation_config", f"{self.override_generation_config} is wrong: {error}"
            ) from error
        return result

    def max_media(self, kind: str) -> int:
        """Images or videos that a prompt may have. Raises ``PenstockError`` (``invalid``) where ``limit_mm_per_prompt``
        is wrong.

        Args:
            kind: image or video.
        """
        try:
            limits = MAX_MEDIA | msgspec.json.decode(self.limit_mm_per_prompt or "{}", type=dict[str, Any])
            counts = {  # vLLM also takes {"image": {"count": 4}}
                name: limit["count"] if isinstance(limit, dict) else limit for name, limit in limits.items()
            }
            result: dict[str, int] = msgspec.convert(counts, dict[str, Annotated[int, msgspec.Meta(ge=0)]])
        except (msgspec.MsgspecError, KeyError) as error:
            raise invalid("limit_mm_per_prompt", f"{self.limit_mm_per_prompt} is wrong: {error}") from error
        return result[kind]

    def media_kwargs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``mm_processor_kwargs`` and ``media_io_kwargs`` by name. Raises ``PenstockError`` (``invalid``) where they
        are no JSON object."""
        result = []
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            given = getattr(self, name)
            try:
                result.append(msgspec.json.decode(given or "{}", type=dict[str, Any]))
            except msgspec.MsgspecError as error:
                raise invalid(name, f"{given} is wrong: {error}") from error
        return result[0], result[1]


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the server: addresses, protocols, limits, security."""

    compat: Annotated[
        str, option("System whose flags, variables, defaults and ports are accepted, too (docs/dialects).")
    ] = ""
    host: Annotated[
        str,
        option("Address to listen on. With api_key or compat, all addresses by default (0.0.0.0)."),
    ] = "127.0.0.1"
    port: Annotated[int, option("TCP port for HTTP; -1 is none (with grpc_port), 0 any free one.", ge=-1, le=65535)] = (
        8000
    )
    health_port: Annotated[
        int, option("TCP port for health checks only; -1 is none, 0 any free one.", ge=-1, le=65535)
    ] = -1
    metrics_aliases: Annotated[
        Literal["off", "routers", "all"],
        option(
            "Metrics that /metrics repeats under vLLM's names: none, what routers and autoscalers read, or all that "
            "its dashboards show."
        ),
    ] = "all"
    metrics_port: Annotated[int, option("TCP port for metrics only; -1 is none, 0 any free one.", ge=-1, le=65535)] = -1
    grpc_port: Annotated[int, option("TCP port for KServe's gRPC; -1 is none, 0 any free one.", ge=-1, le=65535)] = -1
    prefill_instances: Annotated[
        tuple[str, ...],
        option(
            "With --role router: the prefill instances, each as host:port of its engine_address, or as "
            "http://host:port of its server."
        ),
    ] = ()
    decode_instances: Annotated[tuple[str, ...], option("The decode or mixed instances, in the same way.")] = ()
    router_address: Annotated[
        tuple[str, ...],
        option("Routers to which this instance makes itself known, each as host:port or https://host:port."),
    ] = ()
    global_rank_table: Annotated[
        str,
        option("File with all instances of a deployment and their devices (penstock ranktable); needs rank_table."),
    ] = ""
    rank_table: Annotated[
        str,
        option(
            "File with this instance, whose role and cores follow from it, or with the router, whose instances follow "
            "from global_rank_table and node_ports."
        ),
    ] = ""
    node_ports: Annotated[
        tuple[str, ...],
        option("For the router: the ports of all instances, in the order of global_rank_table, prefill first."),
    ] = ()
    pd_min_prefill_tokens: Annotated[
        int,
        option(
            "With --role router: prompts of which the decode instance has fewer tokens to compute than these are left "
            "to it, as asking a prefill instance and transferring the KV takes longer.",
            "tokens",
            ge=0,
        ),
    ] = 256
    exclude_input_in_output: Annotated[
        bool, option("Default of exclude_input_in_output in requests to KServe's models.")
    ] = False
    max_beam_width: Annotated[
        int, option("Maximum beam_width of requests to KServe's models.", ge=1, le=MAX_SEQUENCES)
    ] = MAX_SEQUENCES
    allow_shared_memory: Annotated[
        bool,
        option(
            "Let clients register system shared memory (KServe) also where the server listens beyond this machine: "
            "they read and write any POSIX shared memory object that the server may."
        ),
    ] = False
    max_logits_size: Annotated[
        int,
        option(
            "Maximum size of the logits that a request to KServe's models may ask for; 0 refuses them.", "bytes", ge=0
        ),
    ] = 16 * 2**20
    accumulate_tokens: Annotated[
        bool, option("Each response of a stream of tensorrt_llm_bls has the whole text so far.")
    ] = False
    models: Annotated[
        str,
        option(
            'Further models by name, as JSON: {"NAME": FOLDER}, or {"NAME": {"model": FOLDER, "max_num_seqs": 8}} with '
            "options of the model and its engine. Each has an engine process of its own."
        ),
    ] = ""
    model_control_mode: Annotated[
        Literal["none", "explicit"],
        option("explicit lets clients load and unload models (KServe)."),
    ] = "none"
    load_model: Annotated[
        tuple[str, ...], option("With explicit, models to load at the start; * is all, none loads none.")
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...], option("Names of the model for clients; nothing for that of --model.")
    ] = ()
    require_model: Annotated[bool, option("Refuse requests of OpenAI's API without a model.")] = False
    api_server_count: Annotated[int, option("Number of API processes.", ge=1)] = 1
    api_key: Annotated[tuple[str, ...], option("API keys, one of which a request needs; nothing for open access.")] = ()
    share_prefix_cache: Annotated[
        bool,
        option(
            "With several API keys, let requests of all of them share cached prefixes. By default each has its own, "
            "as cached_tokens and the time to the first token would tell what others have sent."
        ),
    ] = False
    max_concurrency: Annotated[int, option("Open requests of one API process; more are refused.", ge=1)] = 4096
    request_timeout: Annotated[float, option("Maximum duration of a request; 0 is any.", "seconds", ge=0)] = 0.0
    disable_streaming: Annotated[
        bool, option("Send streams in one piece at their end, which takes less work than token by token.")
    ] = False
    template_text: Annotated[
        bool,
        option(
            "Render PaddleNLP's `text` as a user's turn of the chat template, where there is one; else continue it."
        ),
    ] = True
    client_timeout: Annotated[
        float, option("Time without progress in a request or response that closes its connection.", "seconds", gt=0)
    ] = 60.0
    timeout_keep_alive: Annotated[int, option("Time that an idle connection is kept open.", "seconds", ge=0)] = 75
    strict_requests: Annotated[
        bool,
        option(
            "Refuse requests with unknown fields, naming the nearest known one; otherwise they are ignored, logged, "
            "and named in the header x-penstock-ignored."
        ),
    ] = False
    trust_request_chat_template: Annotated[
        bool, option("Accept chat templates of requests, rendered in a separate process within two seconds.")
    ] = False
    max_body_size: Annotated[
        int,
        option(
            "Maximum size of a request; 0 is 64 bytes per token of the context, at least 1 MiB, or 64 MiB for images.",
            "bytes",
            ge=0,
        ),
    ] = 0
    max_header_size: Annotated[int, option("Maximum size of a request's headers together.", "bytes", ge=256)] = (
        64 * 2**10
    )
    root_path: Annotated[
        str,
        option("Prefix of all paths behind a proxy, such as /llm; paths without it are served, too."),
    ] = ""
    ssl_certfile: Annotated[str, option("Certificate chain (PEM) for HTTPS.")] = ""
    ssl_keyfile: Annotated[str, option("The certificate's private key (PEM).")] = ""
    allow_runtime_lora_updating: Annotated[
        bool, option("Let clients load LoRA adapters from any folder of the server, and unload them.")
    ] = False
    server_dev_mode: Annotated[
        bool,
        option(
            "Let clients change the weights of models, pause them and put them to sleep, as vLLM's "
            "VLLM_SERVER_DEV_MODE does: these end or hold up the requests of others."
        ),
    ] = False
    allowed_local_weights_path: Annotated[
        tuple[str, ...],
        option(
            "With server_dev_mode: folders from which clients may have weights read, besides the model's own; their "
            "subfolders, too."
        ),
    ] = ()
    allowed_origins: Annotated[tuple[str, ...], option("Origins allowed by CORS; * is any.")] = ("*",)
    storage_dir: Annotated[
        str,
        option(
            "Folder for what clients have the server keep: stored responses, files, batches. Without it or storage_url "
            "nothing is kept."
        ),
    ] = ""
    storage_url: Annotated[
        str, option("SQL database in place of a file of SQLite in storage_dir, as a URL of SQLAlchemy's.")
    ] = ""
    storage_retention: Annotated[float, option("Time that what is stored is kept.", "days", gt=0)] = 30.0
    storage_quota: Annotated[
        str,
        option(
            "What each API key may have stored: bytes=10G,files=1000,responses=100000,conversations=1000,batches=5, or "
            "some of these; batches are those that have not ended."
        ),
    ] = ""
    storage_limit: Annotated[str, option("The same for what all API keys together have stored.")] = ""
    max_file_size: Annotated[int, option("Maximum size of a file that clients upload.", "bytes", ge=1)] = 200 * 2**20
    batch_concurrency: Annotated[
        int,
        option("Requests of a batch (/v1/batches) that are computed at a time; 0 is half of max_num_seqs.", ge=0),
    ] = 0
    web: Annotated[bool, option("Serve the web page, a playground and a live view, at /.")] = True

    def __post_init__(self) -> None:
        for name in ("storage_quota", "storage_limit"):
            storage_limits(getattr(self, name), name)
        if self.port < 0 and self.grpc_port < 0:
            raise invalid("port", "is -1, which turns HTTP off, and no grpc_port is given: nothing would be served")
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise invalid("root_path", f"{self.root_path!r} must begin with / and go on, as /llm does")


LogLevel = Literal["debug", "info", "warning", "error"]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the log and of traces."""

    log_level: Annotated[LogLevel, option("Minimum level; debug includes health checks.")] = "info"
    log_format: Annotated[Literal["text", "json"], option("Text, or a JSON object per line.")] = "text"
    log_file: Annotated[str, option("File to append the log to, besides standard error; nothing for none.")] = ""
    otlp_endpoint: Annotated[
        str,
        option(
            "OpenTelemetry collector to which traces of requests are sent: http://HOST:4317 over gRPC, "
            "http://HOST:4318/v1/traces over HTTP. Nothing for no traces."
        ),
    ] = ""
    trace_sampling_ratio: Annotated[
        float,
        option("Share of requests that are traced, of those whose traceparent does not say whether.", ge=0, le=1),
    ] = 1.0


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All options, by section."""

    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()
