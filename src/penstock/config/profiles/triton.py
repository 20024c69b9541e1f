"""Profile of Triton Inference Server: flags of ``tritonserver`` and of TensorRT-LLM's ``launch_triton_server.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import invalid

from . import COMBINED, Alias, Profile, Settings, all_ignored, ignored, named, one_of, only_value, refused

WORDS = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
OFF = tuple(word for word, is_on in WORDS.items() if not is_on)
LOG_FORMATS = {"default": "text", "iso8601": "text", "text": "text", "json": "json"}
"""``log_format`` by Triton's ``--log-format``; Triton's formats, default and iso8601, are text."""
ENGINE_SAYS = "the number of ranks is that of the engine folder in --model-repository"
NO_BACKENDS = "there are no backends to load"
FIXED_SHAPES = "inputs and outputs of a model do not depend on its config.pbtxt"
ANY = "0.0.0.0"
"""Triton's default address to listen on."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOG_FILE = "triton_log.txt"
"""Default log file of ``launch_triton_server.py --log``."""
NO_POLLING = "the repository is not polled"
ONE_ENGINE = "all models of an engine share it"
ALL_OR_NONE = "single routes cannot be restricted; --api-key requires a key on all routes"
FORWARDED = "headers are not forwarded to models"
TLS = "TLS is configured for HTTP and gRPC together: set --ssl-certfile and --ssl-keyfile"
TLS_CLIENTS = "client certificates are not verified: use --api-key, or a proxy that verifies them"
KEEPALIVE = "--client-timeout closes connections that make no progress"
NO_CLOUD = "the endpoints of SageMaker and Vertex AI are not served"
NO_CACHE = "responses are not cached; prefixes of prompts are"
OLD_TRACE = "use --otlp-endpoint and --trace-sampling-ratio to send traces to OpenTelemetry"


def switched(text: str) -> bool:
    """Parse a boolean. Raises ``ValueError`` for other text."""
    if text.lower() not in WORDS:
        raise ValueError(f"it is not one of {', '.join(WORDS)}")
    return WORDS[text.lower()]


def off(setting: str) -> Callable[[str], Mapping[str, Any]]:
    """Return a reader of a boolean ``allow_…``: false turns off the port ``setting``."""
    return lambda text: {} if switched(text) else {setting: -1}


def _one_address(given: Mapping[str, str]) -> None:
    """Raise ``PenstockError`` (``invalid``) if ports or shared memory would be accessible to more clients than
    configured: for several different addresses, and for shared memory that cannot be disabled."""
    host = given.get("--http_address", ANY)
    if given.get("--allow_client_shm", "").lower() in ("false", "0", "off", "no") and host in LOOPBACK:
        raise invalid(
            "--allow_client_shm",
            f"cannot be {given['--allow_client_shm']} on {host}: clients on this machine can always use shared memory",
        )
    for name in ("--grpc_address", "--metrics_address"):
        if given.get(name, host) != host:
            raise invalid(name, f"{given[name]!r} must equal --http-address ({host}), which is used for all ports")


def _log(given: Mapping[str, str]) -> Settings:
    """Log file (``--log``, ``--log-file``) and log level (``--log-verbose``, ``--log-info``, ``--log-warning``)."""
    if "--log" in given and "--log_file" not in given:
        yield "log_file", LOG_FILE, "--log"
    if given.get("--log_verbose", "0").strip("+-0"):
        yield "log_level", "debug", "--log_verbose"
        return
    for name, level in (("--log_warning", "error"), ("--log_info", "warning")):
        if WORDS.get(given.get(name, "true").lower(), True) is False:
            yield "log_level", level, name
            return


def _checked(text: str) -> Mapping[str, Any]:
    switched(text)
    return {}


CHECKED_SWITCH = Alias(read=_checked)
"""Alias of a boolean that ``_log`` evaluates."""

PROFILE = Profile(
    name="triton",
    title="Triton Inference Server",
    defaults={"port": 8000, "grpc_port": 8001, "metrics_port": 8002, "kv_cache_free_memory_fraction": 0.9},
    flags={
        "http_port": Alias("port"),
        "http_address": Alias("host"),
        "allow_http": Alias(read=off("port")),
        "grpc_port": Alias("grpc_port"),
        "grpc_address": COMBINED,
        "allow_grpc": Alias(read=off("grpc_port")),
        "metrics_port": Alias("metrics_port"),
        "metrics_address": COMBINED,
        "allow_metrics": Alias(read=off("metrics_port")),
        "allow_gpu_metrics": ignored("GPU metrics are not supported"),
        "allow_cpu_metrics": ignored("CPU metrics are not supported"),
        "metrics_interval_ms": ignored("metrics are computed on request"),
        "metrics_config": ignored("histogram buckets are fixed"),
        **all_ignored(
            "--api-server-count sets the number of API processes", "http_thread_count grpc_infer_thread_count"
        ),
        "grpc_infer_response_compression_level": ignored("clients choose the compression"),
        "log_info": CHECKED_SWITCH,
        "log_warning": CHECKED_SWITCH,
        "log_error": only_value("true", "errors are always logged"),
        "log_verbose": COMBINED,
        "log": Alias(read=lambda text: {}, switch=True),
        "log_file": Alias("log_file"),
        "log_format": Alias("log_format", one_of(LOG_FORMATS)),
        "id": ignored("the server is called triton"),
        "exit_timeout_secs": Alias("drain_timeout"),
        "exit_on_error": ignored("the server always exits if a model cannot be loaded"),
        "strict_readiness": ignored("models are ready only when they can serve requests"),
        "model_control_mode": Alias("model_control_mode", lambda text: _control(text)),
        "load_model": Alias("load_model"),
        "repository_poll_secs": ignored(NO_POLLING),
        "disable_auto_complete_config": ignored(FIXED_SHAPES, True),
        "strict_model_config": ignored(FIXED_SHAPES),
        **all_ignored(NO_BACKENDS, "backend_directory backend_config"),
        "cuda_memory_pool_byte_size": ignored("there are no memory pools"),
        "pinned_memory_pool_byte_size": ignored("there are no memory pools"),
        "buffer_manager_thread_count": ignored("there are no memory pools"),
        "model_load_thread_count": ignored(ONE_ENGINE),
        **all_ignored("--device selects the device", "min_supported_compute_capability enable_peer_access"),
        "rate_limit": only_value("off", "requests wait in one queue (--max-waiting)"),
        "trace_config": refused(OLD_TRACE),
        **named("trace_file trace_level trace_rate trace_count trace_log_frequency", refused(OLD_TRACE)),
        **named("http_restricted_api grpc_restricted_protocol", refused(ALL_OR_NONE, secret=True)),
        **named("http_header_forward_pattern grpc_header_forward_pattern", refused(FORWARDED)),
        "grpc_use_ssl": refused(TLS, unless=OFF),
        "grpc_use_ssl_mutual": refused(TLS_CLIENTS, unless=OFF),
        **named("grpc_server_cert grpc_server_key", refused(TLS)),
        "grpc_root_cert": refused(TLS_CLIENTS),
        "allow_client_shm": Alias("allow_shared_memory", switched),
        "http_max_input_size": Alias("max_body_size"),
        **named("reuse_http_port reuse_grpc_port", refused("servers cannot share a port", unless=OFF)),
        **named(
            "grpc_keepalive_time grpc_keepalive_timeout grpc_keepalive_permit_without_calls "
            "grpc_http2_max_pings_without_data grpc_http2_min_recv_ping_interval_without_data "
            "grpc_http2_max_ping_strikes grpc_max_connection_age grpc_max_connection_age_grace",
            ignored(KEEPALIVE),
        ),
        **named("grpc_infer_allocation_pool_size grpc_max_response_pool_size", ignored("there are no memory pools")),
        **named("allow_sagemaker allow_vertex_ai", refused(NO_CLOUD, unless=OFF)),
        **named(
            "sagemaker_port sagemaker_safe_port_range sagemaker_thread_count vertex_ai_port vertex_ai_thread_count",
            ignored(NO_CLOUD),
        ),
        "vertex_ai_default_model": ignored(NO_CLOUD),
        **named("cache_config cache_directory response_cache_byte_size", ignored(NO_CACHE)),
        "repoagent_directory": refused("repository agents are not loaded"),
        "model_config_name": refused("a model's configuration is always config.pbtxt"),
        "model_load_retry_count": ignored("the server exits if a model cannot be loaded"),
        "model_namespacing": refused("model names must be unique in a repository", unless=OFF),
        **named("host_policy model_load_gpu_limit", ignored("use --device and --gpu-memory-utilization")),
        "cuda_virtual_address_size": ignored("there are no memory pools"),
        "rate_limit_resource": ignored("requests wait in one queue (--max-waiting)"),
        "multimodal_gpu0_cuda_mem_pool_bytes": ignored("there are no memory pools"),
        **all_ignored("MPI is not used", "", switches="allow_run_as_root trtllm_llmapi_launch oversubscribe no_mpi"),
        "world_size": only_value("1", ENGINE_SAYS),
        "tritonserver": ignored("penstock is the server"),
        "force": ignored("several servers may run at the same time on different ports", True, "-f"),
        "disable_spawn_processes": ignored("the server starts the processes of its models", True),
        "multi_model": ignored("all models of a repository are served", True),
        "tensorrt_llm_model_name": only_value("tensorrt_llm", "model names cannot be changed"),
        "exit_timeout": Alias("drain_timeout"),
    },
    prefixes=("TRTLLM_", "TLLM_"),
    check=_one_address,
    together=_log,
)


def _control(text: str) -> str:
    if text not in ("none", "explicit"):
        raise ValueError(f"{NO_POLLING}; set none or explicit")
    return text
