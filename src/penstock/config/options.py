"""The schema of the configuration: every option with its default, unit and help, under the field's own names.

Command lines, configuration files and documentation are generated from it. Reading is done above.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.core.errors import PenstockError, invalid
from penstock.core.quantization import QuantizationName
from penstock.core.sampling import MOST_LOGPROBS, MOST_SEQUENCES, SamplingParams


def option(help: str, unit: str = "", empty: str = "", **bounds: Any) -> msgspec.Meta:
    """What is known of an option besides its name, type and default.

    Args:
        empty: what an empty text stands for.
    """
    return msgspec.Meta(description=help, extra={"unit": unit, "empty": empty}, **bounds)


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs when, and how much of a step each gets."""

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
    max_waiting: Annotated[int, option("Requests that may wait; more are refused at once.", ge=0)] = 256
    max_queue_time: Annotated[
        float, option("Time a request may wait for its first step before it fails; 0 is any.", "seconds", ge=0)
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

    model: Annotated[
        str, option("Folder of a Hugging Face checkpoint, or its name on the hub; nothing for the model in the box.")
    ] = ""
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], option("How weights are read; dummy makes random ones.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], option("What is computed in; auto is the checkpoint's own.")
    ] = "auto"
    quantization: Annotated[
        QuantizationName,
        option(
            "What weights are rounded to at load: w and int say their bits, a8 that activations have 8 bits, too, g32 "
            "that a scale is for 32 weights, not 128 (4 bits) or a whole row (8 bits)."
        ),
    ] = "none"
    weight_cache_dir: Annotated[
        str,
        option(
            "Folder for packed weights, which the next start maps; none for nowhere.",
            empty="~/.cache/penstock",
        ),
    ] = ""
    weight_cache_size: Annotated[
        float,
        option(
            "Most that this folder holds; what was used least recently is deleted. 0 is 30 % of its disk; 10 % of the "
            "disk are always left free.",
            "GiB",
            ge=0,
        ),
    ] = 0.0
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
    kv_cache_free_memory_fraction: Annotated[
        float,
        option(
            "Share for the KV cache of what the weights leave free, on a GPU in place of gpu_memory_utilization; 0 is "
            "as without.",
            ge=0,
            lt=1,
        ),
    ] = 0.0
    kv_cache_memory_bytes: Annotated[
        int, option("Memory of the KV cache; 0 takes half of what is free, on a GPU what it may use.", "bytes", ge=0)
    ] = 0
    kv_cache_sequences: Annotated[
        float,
        option("Sequences of max_model_len that the KV cache holds, where its bytes are not given; 0 counts.", ge=0),
    ] = 0.0
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        option("What keys and values are kept in: auto as they are computed, int8 rounded, which takes half the room."),
    ] = "auto"
    guided_decoding_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar", "off"],
        option("What keeps outputs to schemas, patterns and grammars; off refuses requests for it."),
    ] = "auto"
    guided_decoding_disable_any_whitespace: Annotated[
        bool, option("No space or line break between the parts of any JSON, as requests can ask, too.")
    ] = False
    guided_decoding_disable_additional_properties: Annotated[
        bool, option("Objects of a JSON Schema have no properties but those it lists, where it says nothing of others.")
    ] = False
    speculative_config: Annotated[
        str,
        option(
            'Guess tokens ahead, as JSON: {"method": "ngram"}, or {"model": FOLDER, "num_speculative_tokens": 4} for a '
            "draft model; nothing guesses none. Results do not depend on it."
        ),
    ] = ""
    enable_lora: Annotated[bool, option("Take LoRA adapters besides those of lora_modules.")] = False
    lora_modules: Annotated[
        tuple[str, ...], option("LoRA adapters to load at the start, as PEFT saves them: name=folder.")
    ] = ()
    max_loras: Annotated[int, option("Adapters that may be loaded at the same time.", ge=1, le=1024)] = 16
    max_lora_rank: Annotated[int, option("Largest rank of an adapter.", ge=1)] = 64
    use_warmup: Annotated[
        bool, option("Run the longest prompt and as many sequences as may run, once before requests are welcome.")
    ] = False
    threads: Annotated[int, option("Of the CPU kernels; 0 is one a core. Results do not depend on it.", ge=0)] = 0
    drain_timeout: Annotated[
        float, option("Time that running requests get to end when the engine is stopped.", "seconds", ge=0)
    ] = 30.0
    engine_iteration_timeout: Annotated[
        float,
        option(
            "Silence of an engine's process, beyond the time that its step may take, after which it is killed and "
            "started again; after a quarter of it /health fails. 0 never kills it.",
            "seconds",
            ge=0,
        ),
    ] = 60.0
    swap_space: Annotated[
        float, option("Host memory for blocks of preempted sequences (preemption_mode swap).", "GiB", ge=0)
    ] = 4.0

    def scheduler(self, max_model_len: int) -> SchedulerOptions:
        """The scheduler's part, with the length that the model has."""
        names = msgspec.structs.fields(SchedulerOptions)
        return SchedulerOptions(**{f.name: getattr(self, f.name) for f in names} | {"max_model_len": max_model_len})

    def __post_init__(self) -> None:
        """The scheduler's options are checked once the length is known."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model comes from, besides its name, how its text is read, and what is told of it."""

    pooling_type: Annotated[
        Literal["auto", "last", "mean"],
        option("Hidden state that becomes an embedding; auto is what the checkpoint says, or the last token's."),
    ] = "auto"
    tokenizer: Annotated[str, option("Folder to take the tokenizer from; nothing for the model's own.")] = ""
    chat_template: Annotated[str, option("File with a template, or the template; nothing for the model's own.")] = ""
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "qwen", "ernie", "llama3_json", "mistral", "deepseek_v3"],
        option("The form in which the model calls tools; auto is the one that its chat template has."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "qwen3", "deepseek_r1", "ernie"],
        option(
            "How the model marks its thoughts, which are then told apart from its answers; auto is as its chat "
            "template does, none leaves them in."
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        option(
            "Sampling that a request does not choose: auto is as the model's makers do, vllm as vLLM without them, "
            "else a folder with a generation_config.json to read in place of the model's."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        option(
            "Values for sampling that a request does not choose, before those of generation_config, as JSON: "
            '{"temperature": 0.6}.'
        ),
    ] = ""
    max_logprobs: Annotated[
        int, option("Likeliest tokens that a request may ask to be told at each position.", ge=0, le=MOST_LOGPROBS)
    ] = MOST_LOGPROBS
    enable_logprob: Annotated[
        bool, option("Give log probabilities to who asks; without, such requests are refused.")
    ] = True
    revision: Annotated[str, option("Branch, tag or commit on the hub; nothing for its main branch.")] = ""
    hf_token: Annotated[str, option("Token for the hub; nothing for the environment's HF_TOKEN.")] = ""
    download_dir: Annotated[str, option("Where downloads are kept; nothing for Hugging Face's own cache.")] = ""

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> dict[str, Any]:
        """``override_generation_config`` by field. Raises ``PenstockError`` (``invalid``) where it is wrong."""
        if not self.override_generation_config:
            return {}
        try:
            found = msgspec.json.decode(self.override_generation_config, type=dict[str, Any])
            SamplingParams(**found)
        except (msgspec.MsgspecError, TypeError, PenstockError) as error:
            raise invalid(
                "override_generation_config", f"{self.override_generation_config} is wrong: {error}"
            ) from error
        return found


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask, where, and how much at a time."""

    compat: Annotated[
        str, option("System whose names of settings, values by default and ports are taken, too (docs/dialects).")
    ] = ""
    host: Annotated[
        str,
        option("Address to listen on. With an api_key, or under compat, all of this machine's by default (0.0.0.0)."),
    ] = "127.0.0.1"
    port: Annotated[
        int, option("TCP port for HTTP; -1 is none where there is gRPC, 0 any that is free.", ge=-1, le=65535)
    ] = 8000
    health_port: Annotated[
        int, option("TCP port that answers health checks only; -1 is none, 0 any that is free.", ge=-1, le=65535)
    ] = -1
    metrics_port: Annotated[
        int, option("TCP port that answers for metrics only; -1 is none, 0 any that is free.", ge=-1, le=65535)
    ] = -1
    grpc_port: Annotated[
        int, option("TCP port for KServe's gRPC; -1 is none, 0 any that is free.", ge=-1, le=65535)
    ] = -1
    exclude_input_in_output: Annotated[
        bool, option("Whole answers of KServe's models go without their prompt, where a request does not say.")
    ] = False
    max_beam_width: Annotated[
        int, option("Beams that a request to KServe's models may ask for.", ge=1, le=MOST_SEQUENCES)
    ] = MOST_SEQUENCES
    allow_shared_memory: Annotated[
        bool,
        option(
            "Let clients of KServe's paths register system shared memory where the server listens beyond this machine, "
            "too: they read and write any POSIX shared memory object that the server may."
        ),
    ] = False
    max_logits_size: Annotated[
        int,
        option("Of all scores that a request to KServe's models may ask to be told; 0 tells none.", "bytes", ge=0),
    ] = 16 * 2**20
    accumulate_tokens: Annotated[
        bool, option("Each answer of a stream of the model tensorrt_llm_bls has all of the text so far.")
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
        option("Models are loaded at the start and stay, or are loaded and unloaded by requests, too (KServe's)."),
    ] = "none"
    load_model: Annotated[
        tuple[str, ...], option("Models to load at the start where the control is explicit; * is all, none loads none.")
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...], option("Names under which clients ask for the model; nothing for that of --model.")
    ] = ()
    require_model: Annotated[
        bool, option("Refuse requests of OpenAI's API that do not name their model, which may be absent otherwise.")
    ] = False
    api_server_count: Annotated[int, option("Processes that speak HTTP.", ge=1)] = 1
    api_key: Annotated[tuple[str, ...], option("Keys, of which a client must send one; none lets everybody in.")] = ()
    max_concurrency: Annotated[
        int, option("Requests that one HTTP process has open at the same time; more are refused.", ge=1)
    ] = 4096
    request_timeout: Annotated[float, option("Time a request may take; 0 is any.", "seconds", ge=0)] = 0.0
    disable_streaming: Annotated[
        bool, option("Send streams in one piece once they have ended, which is less work than token by token.")
    ] = False
    template_text: Annotated[
        bool,
        option("Ask PaddleNLP's `text` as a user's turn of the chat template, where there is one; else continue it."),
    ] = True
    client_timeout: Annotated[
        float, option("Silence of a client in mid-request or mid-answer that ends its connection.", "seconds", gt=0)
    ] = 60.0
    timeout_keep_alive: Annotated[int, option("Time an idle connection is kept.", "seconds", ge=0)] = 75
    strict_requests: Annotated[
        bool,
        option(
            "Refuse requests with fields that nobody knows, naming the nearest known one; otherwise they are ignored, "
            "logged, and named in the header x-penstock-ignored."
        ),
    ] = False
    trust_request_chat_template: Annotated[
        bool, option("Render chat templates that requests bring, each in a process that may take two seconds.")
    ] = False
    max_body_size: Annotated[
        int, option("Of a request; 0 is 64 bytes for each token of the context, and at least 1 MiB.", "bytes", ge=0)
    ] = 0
    max_header_size: Annotated[int, option("Of a request's headers together.", "bytes", ge=256)] = 64 * 2**10
    root_path: Annotated[
        str,
        option(
            "Prefix of all paths at which a proxy serves this server, such as /llm; they are found without it, too."
        ),
    ] = ""
    ssl_certfile: Annotated[str, option("Certificate chain (PEM); with it the server speaks HTTPS.")] = ""
    ssl_keyfile: Annotated[str, option("The certificate's private key (PEM).")] = ""
    allow_runtime_lora_updating: Annotated[
        bool, option("Let clients load adapters from any folder of the server, and unload them.")
    ] = False
    allowed_origins: Annotated[tuple[str, ...], option("Origins of web pages that may ask; * is any.")] = ("*",)

    def __post_init__(self) -> None:
        if self.port < 0 and self.grpc_port < 0:
            raise invalid("port", "is -1, which turns HTTP off, and no grpc_port is given: nothing would be served")
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise invalid("root_path", f"{self.root_path!r} must begin with / and go on, as /llm does")


LogLevel = Literal["debug", "info", "warning", "error"]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is written to standard error, and to a file beside it."""

    log_level: Annotated[LogLevel, option("Least level; debug shows health checks, too.")] = "info"
    log_format: Annotated[Literal["text", "json"], option("Lines for people, or a JSON object a line.")] = "text"
    log_file: Annotated[str, option("File to which the log is appended, too; nothing for none.")] = ""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to set, by section."""

    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()
