"""Triton Inference Server: the flags of ``tritonserver`` and of TensorRT-LLM's ``launch_triton_server.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import invalid

from . import COMBINED, Alias, Profile, Settings, ignored, one_of, only_value, refused

WORDS = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
LOG_FORMATS = {"default": "text", "iso8601": "text", "text": "text", "json": "json"}
"""Both of Triton's formats are text."""
ENGINE_SAYS = "an engine's folder says how many ranks it is for, and --model-repository names it"
NO_BACKENDS = "there are no backends to load"
OWN_SHAPES = "inputs and outputs of a model do not depend on its config.pbtxt"
ANY = "0.0.0.0"
"""Default address."""
LOG_FILE = "triton_log.txt"
"""Default log file of ``launch_triton_server.py --log``."""
NO_POLLING = "the repository is not polled"
ONE_ENGINE = "all models over an engine share it"


def switched(text: str) -> bool:
    """A boolean. Raises ``ValueError`` for other text."""
    if text.lower() not in WORDS:
        raise ValueError(f"it is not one of {', '.join(WORDS)}")
    return WORDS[text.lower()]


def off(setting: str) -> Callable[[str], Mapping[str, Any]]:
    """A reader of ``allow_…``: false turns the port off."""
    return lambda text: {} if switched(text) else {setting: -1}


def _one_address(given: Mapping[str, str]) -> None:
    """Raises ``PenstockError`` (``invalid``) for several addresses: a port would be open to more than it should."""
    host = given.get("--http_address", ANY)
    for name in ("--grpc_address", "--metrics_address"):
        if given.get(name, host) != host:
            raise invalid(name, f"{given[name]!r} is wrong: all listen on one address, --http-address ({host})")


def _log(given: Mapping[str, str]) -> Settings:
    """The log file and level: ``--log`` and ``--log-file`` give the file, three switches and a number the level."""
    if "--log" in given and "--log_file" not in given:
        yield "log_file", LOG_FILE, "--log"
    if given.get("--log_verbose", "0").strip("+-0"):
        yield "log_level", "debug", "--log_verbose"
        return
    for name, level in (("--log_warning", "error"), ("--log_info", "warning")):
        if WORDS.get(given.get(name, "true").lower(), True) is False:
            yield "log_level", level, name
            return


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
        "metrics_interval_ms": ignored("metrics are computed when they are requested"),
        "metrics_config": ignored("the buckets of histograms are fixed"),
        "http_thread_count": ignored("--api-server-count sets the number of API processes"),
        "grpc_infer_thread_count": ignored("--api-server-count sets the number of API processes"),
        "grpc_infer_response_compression_level": ignored("clients choose the compression"),
        "log_info": COMBINED,
        "log_warning": COMBINED,
        "log_error": only_value("true", "errors are always logged"),
        "log_verbose": COMBINED,
        "log": Alias(read=lambda text: {}, switch=True),
        "log_file": Alias("log_file"),
        "log_format": Alias("log_format", one_of(LOG_FORMATS)),
        "id": ignored("the server is called triton"),
        "exit_timeout_secs": Alias("drain_timeout"),
        "exit_on_error": ignored("a model that cannot be loaded always stops the start"),
        "strict_readiness": ignored("models are ready only when they can serve requests"),
        "model_control_mode": Alias("model_control_mode", lambda text: _control(text)),
        "load_model": Alias("load_model"),
        "repository_poll_secs": ignored(NO_POLLING),
        "disable_auto_complete_config": ignored(
            "inputs and outputs of a model do not depend on its config.pbtxt", True
        ),
        "strict_model_config": ignored(OWN_SHAPES),
        "backend_directory": ignored(NO_BACKENDS),
        "backend_config": ignored(NO_BACKENDS),
        "cuda_memory_pool_byte_size": ignored("there are no memory pools"),
        "pinned_memory_pool_byte_size": ignored("there are no memory pools"),
        "buffer_manager_thread_count": ignored("there are no memory pools"),
        "model_load_thread_count": ignored(ONE_ENGINE),
        "min_supported_compute_capability": ignored("--device selects the device"),
        "rate_limit": only_value("off", "requests wait in one queue (--max-waiting)"),
        "trace_config": refused("--otlp-endpoint and --trace-sampling-ratio send traces to OpenTelemetry"),
        "world_size": only_value("1", ENGINE_SAYS),
        "tritonserver": ignored("this is the server"),
        "force": ignored("several servers may run at the same time, each on its own ports", True, "-f"),
        "disable_spawn_processes": ignored("the server starts the processes of its models itself", True),
        "trtllm_llmapi_launch": ignored("MPI is not used", True),
        "multimodal_gpu0_cuda_mem_pool_bytes": ignored("there are no memory pools"),
        "enable_peer_access": ignored("GPUs exchange data through NCCL"),
        "multi_model": ignored("all models of a repository are served", True),
        "tensorrt_llm_model_name": only_value("tensorrt_llm", "models have the names that they have in TensorRT-LLM"),
        "oversubscribe": ignored("MPI is not used", True),
        "no_mpi": ignored("MPI is not used", True),
        "exit_timeout": Alias("drain_timeout"),
    },
    check=_one_address,
    together=_log,
)


def _control(text: str) -> str:
    if text not in ("none", "explicit"):
        raise ValueError(f"{NO_POLLING}; only none and explicit are possible")
    return text
