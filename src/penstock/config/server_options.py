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

    compat: str = ""
    """System whose flags, variables, defaults and ports are accepted, too (docs/dialects)."""
    host: str = "127.0.0.1"
    """Address to listen on. With api_key or compat, all addresses by default (0.0.0.0)."""
    port: Annotated[int, option(ge=-1, le=65535)] = 8000
    """TCP port for HTTP; -1 is none (with grpc_port), 0 any free one."""
    health_port: Annotated[int, option(ge=-1, le=65535)] = -1
    """TCP port for health checks only; -1 is none, 0 any free one."""
    metrics_aliases: Literal["off", "routers", "all"] = "all"
    """Metrics that /metrics repeats under vLLM's names: none, what routers and autoscalers read, or all that its
    dashboards show."""
    metrics_port: Annotated[int, option(ge=-1, le=65535)] = -1
    """TCP port for metrics only; -1 is none, 0 any free one."""
    grpc_port: Annotated[int, option(ge=-1, le=65535)] = -1
    """TCP port for KServe's gRPC; -1 is none, 0 any free one."""
    prefill_instances: tuple[str, ...] = ()
    """With --role router: the prefill instances, each as host:port of its engine_address, or as http://host:port of its
    server."""
    decode_instances: tuple[str, ...] = ()
    """The decode or mixed instances, in the same way."""
    router_address: tuple[str, ...] = ()
    """Routers to which this instance makes itself known, each as host:port or https://host:port."""
    global_rank_table: str = ""
    """File with all instances of a deployment and their devices (penstock ranktable); needs rank_table."""
    rank_table: str = ""
    """File with this instance, whose role and cores follow from it, or with the router, whose instances follow from
    global_rank_table and node_ports."""
    node_ports: tuple[str, ...] = ()
    """For the router: the ports of all instances, in the order of global_rank_table, prefill first."""
    pd_min_prefill_tokens: Annotated[int, option("tokens", ge=0)] = 256
    """With --role router: prompts of which the decode instance has fewer tokens to compute than these are left to it,
    as asking a prefill instance and transferring the KV takes longer."""
    exclude_input_in_output: bool = False
    """Default of exclude_input_in_output in requests to KServe's models."""
    max_beam_width: Annotated[int, option(ge=1, le=MAX_SEQUENCES)] = MAX_SEQUENCES
    """Maximum beam_width of requests to KServe's models."""
    allow_shared_memory: bool = False
    """Let clients register system shared memory (KServe) also where the server listens beyond this machine: they read
    and write any POSIX shared memory object that the server may."""
    max_logits_size: Annotated[int, option("bytes", ge=0)] = 16 * 2**20
    """Maximum size of the logits that a request to KServe's models may ask for; 0 refuses them."""
    accumulate_tokens: bool = False
    """Each response of a stream of tensorrt_llm_bls has the whole text so far."""
    models: str = ""
    """Further models by name, as JSON: {"NAME": FOLDER}, or {"NAME": {"model": FOLDER, "max_num_seqs": 8}} with options
    of the model and its engine. Each has an engine process of its own."""
    model_control_mode: Literal["none", "explicit"] = "none"
    """explicit lets clients load and unload models (KServe)."""
    load_model: tuple[str, ...] = ()
    """With explicit, models to load at the start; * is all, none loads none."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; nothing for that of --model."""
    require_model: bool = False
    """Refuse requests of OpenAI's API without a model."""
    api_server_count: Annotated[int, option(ge=1)] = 1
    """Number of API processes."""
    api_key: tuple[str, ...] = ()
    """API keys, one of which a request needs; nothing for open access."""
    admin_api_key: tuple[str, ...] = ()
    """API keys that may also change the server for all clients: log and trace settings, loading models and adapters,
    sleep, pause, prefix cache. Without any, a single api_key may; of several, none may."""
    share_prefix_cache: bool = False
    """With several API keys, let requests of all of them share cached prefixes. By default each has its own, as
    cached_tokens and the time to the first token would tell what others have sent."""
    max_concurrency: Annotated[int, option(ge=1)] = 4096
    """Open requests of one API process; more are refused."""
    request_timeout: Annotated[float, option("seconds", ge=0)] = 0.0
    """Maximum duration of a request; 0 is any."""
    disable_streaming: bool = False
    """Send streams in one piece at their end, which takes less work than token by token."""
    template_text: bool = True
    """Render PaddleNLP's `text` as a user's turn of the chat template, where there is one; else continue it."""
    client_timeout: Annotated[float, option("seconds", gt=0)] = 60.0
    """Time without progress in a request or response that closes its connection."""
    api_process_timeout: Annotated[float, option("seconds", ge=0)] = 60.0
    """Time without an iteration of an API process's event loop after which the process is killed and restarted. At
    least 5; 0 never kills it."""
    timeout_keep_alive: Annotated[int, option("seconds", ge=0)] = 75
    """Time that an idle connection is kept open."""
    strict_requests: bool = False
    """Refuse requests with unknown fields, naming the nearest known one; otherwise they are ignored, logged, and named
    in the header x-penstock-ignored."""
    trust_request_chat_template: bool = False
    """Accept chat templates of requests, rendered in a separate process within two seconds."""
    max_body_size: Annotated[int, option("bytes", ge=0)] = 0
    """Maximum size of a request; 0 is 64 bytes per token of the context, at least 1 MiB, or 64 MiB for requests that
    may have images."""
    max_body_memory: Annotated[int, option("bytes", ge=0)] = 0
    """Memory for the bodies of open requests in an API process, half of it for one client; further ones wait or get
    status 429. 0 is three times max_body_size, at least 192 MiB."""
    max_header_size: Annotated[int, option("bytes", ge=256)] = 64 * 2**10
    """Maximum size of a request's headers together."""
    root_path: str = ""
    """Prefix of all paths behind a proxy, such as /llm; paths without it are served, too."""
    ssl_certfile: str = ""
    """Certificate chain (PEM) for HTTPS."""
    ssl_keyfile: str = ""
    """The certificate's private key (PEM)."""
    allow_runtime_lora_updating: bool = False
    """Let clients load LoRA adapters from any folder of the server, and unload them."""
    server_dev_mode: bool = False
    """Let clients change the weights of models, pause them and put them to sleep, as vLLM's VLLM_SERVER_DEV_MODE does:
    these end or hold up the requests of others."""
    allowed_local_weights_path: tuple[str, ...] = ()
    """With server_dev_mode: folders from which clients may have weights read, besides the model's own; their
    subfolders, too."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Origins allowed by CORS; * is any."""
    storage_dir: str = ""
    """Folder for what clients have the server keep: stored responses, files, batches. Without it or storage_url nothing
    is kept."""
    storage_url: str = ""
    """SQL database in place of a file of SQLite in storage_dir, as a URL of SQLAlchemy's."""
    storage_retention: Annotated[float, option("days", gt=0)] = 30.0
    """Time that what is stored is kept."""
    storage_quota: str = ""
    """What each API key may have stored: bytes=10G,files=1000,responses=100000,conversations=1000,batches=5, or some of
    these; batches are those that have not ended."""
    storage_limit: str = ""
    """The same for what all API keys together have stored."""
    max_conversation_items: Annotated[int, option(ge=1)] = 10_000
    """Items of a stored conversation (/v1/conversations)."""
    max_conversation_bytes: Annotated[int, option("bytes", ge=1)] = 64 * 2**20
    """Size of all items of a stored conversation; an image in it counts with its base64."""
    max_file_size: Annotated[int, option("bytes", ge=1)] = 200 * 2**20
    """Maximum size of a file that clients upload."""
    batch_concurrency: Annotated[int, option(ge=0)] = 0
    """Requests of a batch (/v1/batches) that are computed at a time; 0 is half of max_num_seqs."""
    web: bool = True
    """Serve the web page, a playground and a live view, at /."""

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

    log_level: LogLevel = "info"
    """Minimum level; debug includes health checks."""
    log_format: Literal["text", "json"] = "text"
    """Text, or a JSON object per line."""
    log_file: str = ""
    """File to append the log to, besides standard error; nothing for none."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector to which traces of requests are sent: http://HOST:4317 over gRPC,
    http://HOST:4318/v1/traces over HTTP. Nothing for no traces."""
    trace_sampling_ratio: Annotated[float, option(ge=0, le=1)] = 1.0
    """Share of requests that are traced, of those whose traceparent does not say whether."""
