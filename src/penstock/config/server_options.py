"""Options of the server, logs and traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.core.errors import invalid
from penstock.core.sampling import MAX_SEQUENCES

from .option import option
from .storage_limits import storage_limits

MIN_API_PROCESS_TIMEOUT = 5.0
"""Minimum of ``api_process_timeout`` in seconds. API processes send a heartbeat twice per second."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the server: addresses, protocols, limits, security."""

    compat: str = ""
    """System, such as vllm: its flags, environment variables, defaults and ports are used in addition to Penstock's
    (see docs/dialects); empty: no system."""
    host: str = "127.0.0.1"
    """Address to listen on. With api_key or compat, the default is 0.0.0.0 (all addresses)."""
    port: Annotated[int, option(ge=-1, le=65535)] = 8000
    """TCP port for HTTP; -1: no HTTP (needs grpc_port), 0: any free port."""
    health_port: Annotated[int, option(ge=-1, le=65535)] = -1
    """TCP port for health checks only; -1: no separate port, 0: any free port."""
    metrics_aliases: Literal["off", "routers", "all"] = "all"
    """Metrics that /metrics repeats under vLLM's names: off: no metrics, routers: metrics that routers and autoscalers
    read, all: also metrics that vLLM's dashboards show."""
    metrics_port: Annotated[int, option(ge=-1, le=65535)] = -1
    """TCP port for metrics only; -1: no separate port, 0: any free port."""
    grpc_port: Annotated[int, option(ge=-1, le=65535)] = -1
    """TCP port for KServe's gRPC API; -1: no gRPC, 0: any free port."""
    prefill_instances: tuple[str, ...] = ()
    """Prefill instances of a router (role router), each as host:port of its engine_address, or http://host:port of its
    server."""
    decode_instances: tuple[str, ...] = ()
    """Decode or mixed instances of a router (role router), each as host:port of its engine_address, or http://host:port
    of its server."""
    router_address: tuple[str, ...] = ()
    """Routers with which this instance registers, each as host:port or https://host:port."""
    global_rank_table: str = ""
    """File with all instances of a deployment and their devices (written by penstock ranktable); needs rank_table."""
    rank_table: str = ""
    """Local rank table (JSON) of this process. For an instance, it sets the role and the CPU cores. For the router, the
    instances are taken from global_rank_table and node_ports."""
    node_ports: tuple[str, ...] = ()
    """For a router with global_rank_table: ports of all instances, in the order of global_rank_table, prefill instances
    first."""
    pd_min_prefill_tokens: Annotated[int, option("tokens", ge=0)] = 256
    """With role router: minimum number of uncached prompt tokens for which a prefill instance is used. The decode
    instance computes shorter prompts, as transferring their KV would take longer."""
    exclude_input_in_output: bool = False
    """Default of the parameter exclude_input_in_output of requests to KServe models."""
    max_beam_width: Annotated[int, option(ge=1, le=MAX_SEQUENCES)] = MAX_SEQUENCES
    """Maximum of the parameter beam_width in requests to KServe models."""
    allow_shared_memory: bool = False
    """Let clients register system shared memory (KServe) even if the server listens on a non-loopback address.
    Clients can then read and write any POSIX shared memory object that the server can."""
    max_logits_size: Annotated[int, option("bytes", ge=0)] = 16 * 2**20
    """Maximum size of the logits returned by a request to KServe models; 0: such requests are rejected."""
    accumulate_tokens: bool = False
    """Send the whole text so far in each streamed response of tensorrt_llm_bls, instead of the new text."""
    models: str = ""
    """Additional models by name, as JSON: {"NAME": FOLDER}, or {"NAME": {"model": FOLDER, "max_num_seqs": 8}} with
    model and engine options. Each has a separate engine process."""
    model_control_mode: Literal["none", "explicit"] = "none"
    """explicit: clients may load and unload models (KServe); none: they may not."""
    load_model: tuple[str, ...] = ()
    """Models to load at the start with model_control_mode explicit; *: all models. By default, no model is loaded."""
    model_idle_timeout: Annotated[float, option("seconds", ge=0)] = 0.0
    """Seconds without a request after which a model is unloaded: its engine process ends, which frees its memory. The
    next request loads it again, and waits. Ollama's keep_alive changes the time of a model. 0: never."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API; empty: the value of model."""
    require_model: bool = False
    """Reject OpenAI API requests without the field model; otherwise the first model is used."""
    api_server_count: Annotated[int, option(ge=1)] = 1
    """Number of API processes."""
    api_key: tuple[str, ...] = ()
    """API keys: each request must have one of them; empty: no authentication."""
    admin_api_key: tuple[str, ...] = ()
    """API keys that may also change the server for all clients: log and trace settings, loading of models and adapters,
    sleep, pause, prefix cache. If empty: a single api_key has these rights; with several, none has."""
    share_prefix_cache: bool = False
    """With several API keys, share cached prefixes between them. By default each key has a separate prefix cache, as
    cached_tokens and the time to first token would reveal prompts of other keys."""
    max_concurrency: Annotated[int, option(ge=1)] = 4096
    """Maximum number of open requests of an API process; further requests are rejected."""
    request_timeout: Annotated[float, option("seconds", ge=0)] = 0.0
    """Maximum duration of a request; 0: no limit."""
    disable_streaming: bool = False
    """Send the whole content of a stream at its end, which takes less work than sending each token."""
    template_text: bool = True
    """Render PaddleNLP's `text` as a user message with the chat template, if the model has one; otherwise continue the
    text."""
    client_timeout: Annotated[float, option("seconds", gt=0)] = 60.0
    """Time without progress in a request or response after which its connection is closed."""
    api_process_timeout: Annotated[float, option("seconds", ge=0)] = 60.0
    """Kill and restart an API process whose event loop does not run for this time; at least 5; 0: never."""
    timeout_keep_alive: Annotated[int, option("seconds", ge=0)] = 75
    """Time after which an idle connection is closed."""
    strict_requests: bool = False
    """Reject requests with unknown fields; the error suggests the nearest known field. Otherwise unknown fields are
    ignored, logged, and listed in the response header x-penstock-ignored."""
    trust_request_chat_template: bool = False
    """Accept chat templates in requests. They are rendered in a separate process, for at most two seconds."""
    max_body_size: Annotated[int, option("bytes", ge=0)] = 0
    """Maximum size of a request body; 0: 64 bytes per token of the context, at least 1 MiB, or at least 64 MiB for
    requests that may have images."""
    max_body_memory: Annotated[int, option("bytes", ge=0)] = 0
    """Memory of an API process for the bodies of open requests, half of it for one client; further requests wait or get
    status 429. 0: three times max_body_size, at least 192 MiB."""
    max_header_size: Annotated[int, option("bytes", ge=256)] = 64 * 2**10
    """Maximum total size of a request's headers."""
    root_path: str = ""
    """Prefix of all paths at a proxy, such as /llm; paths without the prefix are also served."""
    ssl_certfile: str = ""
    """Certificate chain (PEM) for HTTPS; empty: HTTP."""
    ssl_keyfile: str = ""
    """Private key (PEM) of ssl_certfile."""
    allow_runtime_lora_updating: bool = False
    """Let clients load LoRA adapters from any folder of the server, and unload them."""
    server_dev_mode: bool = False
    """Let clients update a model's weights, pause it and put it to sleep, like vLLM's VLLM_SERVER_DEV_MODE; this aborts
    or delays the requests of other clients."""
    allowed_local_weights_path: tuple[str, ...] = ()
    """With server_dev_mode: folders (with subfolders) from which clients may update weights, in addition to the model's
    folder."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Origins allowed by CORS; *: any."""
    storage_dir: str = ""
    """Folder for stored responses, conversations, files and batches; without it and storage_url, nothing is stored."""
    storage_url: str = ""
    """SQL database (SQLAlchemy URL) instead of an SQLite file in storage_dir."""
    storage_retention: Annotated[float, option("days", gt=0)] = 30.0
    """Time after which stored objects are deleted."""
    storage_quota: str = ""
    """Limits of each API key's stored objects, one or more of bytes=10G,files=1000,responses=100000,conversations=1000,
    batches=5 (unfinished batches); empty: no limits."""
    storage_limit: str = ""
    """Limits of the stored objects of all API keys together, in the form of storage_quota; empty: no limits."""
    max_conversation_items: Annotated[int, option(ge=1)] = 10_000
    """Maximum number of items of a stored conversation (/v1/conversations)."""
    max_conversation_bytes: Annotated[int, option("bytes", ge=1)] = 64 * 2**20
    """Maximum total size of the items of a stored conversation; images count as base64."""
    max_file_size: Annotated[int, option("bytes", ge=1)] = 200 * 2**20
    """Maximum size of an uploaded file."""
    batch_concurrency: Annotated[int, option(ge=0)] = 0
    """Maximum number of batch requests (/v1/batches) that an API process computes at the same time; 0: half of
    max_num_seqs, divided by api_server_count."""
    mcp_config: str = ""
    """JSON file of MCP servers whose tools requests to /v1/responses may use: {"mcpServers": {"NAME": {"command": ...,
    "args": [...], "env": {...}} or {"url": ..., "headers": {...}}}}; empty: none."""
    allow_mcp_urls: bool = False
    """Let clients also name other MCP servers by URL (server_url). Only public addresses are connected to."""
    mcp_timeout: Annotated[float, option("seconds", gt=0)] = 60.0
    """Maximum time to connect to an MCP server, to list its tools, and of a tool call."""
    mcp_max_rounds: Annotated[int, option(ge=1)] = 16
    """Maximum number of times that a response with MCP tools runs the model; each time may call several tools."""
    mcp_max_result_size: Annotated[int, option("bytes", ge=1)] = 256 * 2**10
    """Maximum size of the result of an MCP tool call; a larger one becomes an error that the model sees."""
    mcp_max_connections: Annotated[int, option(ge=1)] = 64
    """Maximum number of open connections of an API process to MCP servers; each response has separate connections."""
    web: bool = True
    """Serve the web page with a playground and a live view at /."""

    def __post_init__(self) -> None:
        for name in ("storage_quota", "storage_limit"):
            storage_limits(getattr(self, name), name)
        if self.port < 0 and self.grpc_port < 0:
            raise invalid("port", "is -1 (no HTTP) without grpc_port, so nothing would be served: set one of them")
        if 0 < self.api_process_timeout < MIN_API_PROCESS_TIMEOUT:
            message = f"must be at least {MIN_API_PROCESS_TIMEOUT:g} seconds, is {self.api_process_timeout:g}: a busy "
            message += "or starting process may not respond for so long; 0 never kills a process"
            raise invalid("api_process_timeout", message, MIN_API_PROCESS_TIMEOUT)
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.strip("/")):
            raise invalid("root_path", f"{self.root_path!r} must be a path such as /llm")


LogLevel = Literal["debug", "info", "warning", "error"]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of logs and traces."""

    log_level: LogLevel = "info"
    """Minimum level of log lines; at debug, health checks are logged, too."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text, or one JSON object per line."""
    log_file: str = ""
    """File to which the log is appended, in addition to standard error; empty: no file."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that receives traces of requests: http://HOST:4317 (gRPC) or http://HOST:4318/v1/traces
    (HTTP); empty: no traces."""
    trace_sampling_ratio: Annotated[float, option(ge=0, le=1)] = 1.0
    """Share of traced requests among those without a traceparent header. If a request has the header, its sampled flag
    decides."""
