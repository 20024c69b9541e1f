"""Options of the server, its log and its traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.core.errors import invalid
from penstock.core.sampling import MAX_SEQUENCES

from .option import option
from .storage_limits import storage_limits

MIN_API_PROCESS_TIMEOUT = 5.0
"""Seconds. An API process tells twice a second that it lives."""


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
    admin_api_key: Annotated[
        tuple[str, ...],
        option(
            "API keys that may also change the server for all clients: log and trace settings, loading models and "
            "adapters, sleep, pause, prefix cache. Without any, a single api_key may; of several, none may."
        ),
    ] = ()
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
    api_process_timeout: Annotated[
        float,
        option(
            "Time without an iteration of an API process's event loop after which the process is killed and restarted. "
            "At least 5; 0 never kills it.",
            "seconds",
            ge=0,
        ),
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
            "Maximum size of a request; 0 is 64 bytes per token of the context, at least 1 MiB, or 64 MiB for requests "
            "that may have images.",
            "bytes",
            ge=0,
        ),
    ] = 0
    max_body_memory: Annotated[
        int,
        option(
            "Memory for the bodies of open requests in an API process, half of it for one client; further ones wait or "
            "get status 429. 0 is three times max_body_size, at least 192 MiB.",
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
    max_conversation_items: Annotated[int, option("Items of a stored conversation (/v1/conversations).", ge=1)] = 10_000
    max_conversation_bytes: Annotated[
        int, option("Size of all items of a stored conversation; an image in it counts with its base64.", "bytes", ge=1)
    ] = 64 * 2**20
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
        if 0 < self.api_process_timeout < MIN_API_PROCESS_TIMEOUT:
            reason = f"{self.api_process_timeout:g} seconds are too few, as a process that is busy or starting may not "
            reason += f"answer for so long; give {MIN_API_PROCESS_TIMEOUT:g} or more, or 0 to never kill a process"
            raise invalid("api_process_timeout", reason, MIN_API_PROCESS_TIMEOUT)
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
