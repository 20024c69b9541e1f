"""Environment variables of vLLM. Unknown ones are logged, or rejected if they are security-related."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.sampling import MAX_SEQUENCES

from . import Alias, ignored, named, one_of, refused

PREFIXES = ("VLLM_",)
LEVELS = {"trace": "debug", "debug": "debug", "info": "info", "warning": "warning", "error": "error"}
LEVELS |= {"critical": "error"}
HUBS = ("huggingface", "modelscope")
NO_STATISTICS = "no usage statistics are sent"
NO_CODE = "loading code is not supported"
NO_PICKLE = "nothing is ever deserialized with pickle"
ADAPTERS = "load adapters with --lora-modules, or let clients load them with VLLM_ALLOW_RUNTIME_LORA_UPDATING"
LISTENING = "--host, --master-addr, --engine-address and --kv-host set the addresses of the server"
ON = {"1": True, "true": True, "0": False, "false": False}
LIMITS = {"VLLM_MAX_N_SEQUENCES": MAX_SEQUENCES, "VLLM_MAX_COMPLETION_PROMPTS": 2048}
"""Limits of requests that are fixed in Penstock."""


def one_key(text: str) -> tuple[str, ...]:
    """Parse an API key. Raises ``ValueError`` for a comma, which would separate two keys."""
    if "," in text:
        raise ValueError("an API key must not contain a comma, which separates keys")
    return (text,)


def times(unit: int) -> Callable[[str], int]:
    """Return a reader of numbers that multiplies them by ``unit``."""
    return lambda text: int(float(text) * unit)


RESTRICTING: Mapping[str, Alias] = {"VLLM_API_KEY": Alias("api_key", one_key, secret=True)}
"""Variables that protect the server, which are also read without a profile."""

SECURITY: Mapping[str, Alias] = {
    **RESTRICTING,
    "VLLM_SERVER_DEV_MODE": Alias("server_dev_mode", one_of(ON)),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": Alias("allow_runtime_lora_updating", one_of(ON)),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": ignored(NO_PICKLE),
    "VLLM_PLUGINS": refused(NO_CODE),
    "VLLM_LORA_RESOLVER_CACHE_DIR": refused(ADAPTERS),
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": refused(ADAPTERS),
    "VLLM_MEDIA_CONNECTOR": refused(NO_CODE, unless=("http",)),
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": refused(
        "redirects of images and videos are followed if their targets have public addresses or are in "
        "--allowed-media-domains; use a proxy to forbid them",
        unless=("1",),
    ),
    "VLLM_MEDIA_CACHE": ignored("downloaded images and videos are not written to disk"),
    "VLLM_MAX_IMAGE_PIXELS": Alias("max_image_pixels"),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": Alias("max_audio_size", times(2**20)),
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": Alias("max_audio_duration"),
    "VLLM_IMAGE_FETCH_TIMEOUT": Alias("media_timeout"),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": Alias("timeout_keep_alive"),
    "VLLM_NIXL_SIDE_CHANNEL_HOST": Alias("kv_host"),
    "VLLM_NIXL_SIDE_CHANNEL_PORT": Alias("kv_port"),
    **named(
        "VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT "
        "VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT",
        ignored(LISTENING),
    ),
    **named(
        "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK DO_NOT_TRACK VLLM_USAGE_STATS_SERVER VLLM_USAGE_SOURCE",
        ignored(NO_STATISTICS),
    ),
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": ignored("the text of responses is never logged"),
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ignored("workers have the environment of their engine"),
    "VLLM_TORCH_PROFILER_DIR": ignored("clients cannot start a profiler"),
    "VLLM_ENABLE_RESPONSES_API_STORE": ignored("set --storage-dir to store responses"),
    **named(
        "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL",
        ignored("set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL for object stores"),
    ),
    **named(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE "
        "VLLM_ALLOW_DEPRECATED_BLOCK_MANAGER_V1 VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE "
        "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION",
        ignored("it has no equivalent"),
    ),
}
"""Security-related variables, and other variables with names that match ``profiles.SECURITY``."""


def _limit(name: str) -> Alias:
    """Alias of a limit that is fixed in Penstock; lower values are rejected."""

    def read(text: str) -> Mapping[str, Any]:
        if int(text) < LIMITS[name]:
            raise ValueError(f"the limit is {LIMITS[name]} and cannot be lowered: unset the variable")
        return {}

    return Alias(read=read)


VARIABLES: Mapping[str, Alias] = {
    **SECURITY,
    **{name: _limit(name) for name in LIMITS},
    "VLLM_USE_MODELSCOPE": Alias("model_hub", lambda text: HUBS[text.lower() in ("true", "1")]),
    "VLLM_LOGGING_LEVEL": Alias("log_level", one_of(LEVELS)),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": Alias("engine_iteration_timeout"),
    "VLLM_CPU_KVCACHE_SPACE": Alias("kv_cache_memory_bytes", times(2**30)),
    "VLLM_PP_LAYER_PARTITION": Alias("pipeline_parallel_layers"),
    "VLLM_BATCH_INVARIANT": Alias("batch_invariant", one_of(ON)),
}
