"""Environment variables of FastDeploy. Unknown ones are logged, or rejected if they are security-related."""

from __future__ import annotations

from collections.abc import Mapping

from . import Alias, ignored, named, one_of, refused

PREFIXES = ("FD_",)
ON = {"0": False, "1": True, "false": False, "true": True}
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "critical": "error"}
NO_STATISTICS = "no usage statistics are sent"
TRACES = "use --otlp-endpoint to send traces to OpenTelemetry"


def _hub(text: str) -> str:
    if text.upper() == "AISTUDIO":
        raise ValueError("AI Studio is not supported; set HUGGINGFACE or MODELSCOPE")
    return str(one_of({"huggingface": "huggingface", "modelscope": "modelscope"})(text))


VARIABLES: Mapping[str, Alias] = {
    "FD_API_KEY": Alias("api_key", lambda text: tuple(filter(None, text.split(","))), secret=True),
    "FD_PLUGINS": refused("loading code is not supported"),
    "FD_ENABLE_INTERNAL_ADAPTER": refused("the engine is accessible by HTTP only", unless=("0",)),
    **named(
        "FD_ZMQ_RECV_REQUEST_SERVER_PORT FD_ZMQ_RECV_REQUEST_SERVER_PORTS FD_ZMQ_SEND_RESPONSE_SERVER_PORT "
        "FD_ZMQ_SEND_RESPONSE_SERVER_PORTS FD_ZMQ_CONTROL_CMD_SERVER_PORTS FD_HOST_NAME",
        ignored("--host and --engine-address set the addresses of the server"),
    ),
    "FD_MODEL_SOURCE": Alias("model_hub", _hub),
    "FD_MODEL_CACHE": Alias("download_dir"),
    "FD_LOG_DIR": Alias("log_file", lambda text: f"{text.rstrip('/')}/fastdeploy.log"),
    "FD_LOG_LEVEL": Alias("log_level", one_of(LEVELS)),
    "FD_DEBUG": Alias(read=lambda text: {"log_level": "debug"} if text not in ("0", "") else {}),
    "FD_GUIDANCE_DISABLE_ADDITIONAL": Alias("guided_decoding_disable_additional_properties", one_of(ON)),
    **named("FD_USAGE_STATS_SERVER FD_USAGE_SOURCE DO_NOT_TRACK", ignored(NO_STATISTICS)),
    **named("FD_LOG_REQUESTS FD_LOG_REQUESTS_LEVEL FD_LOG_MAX_LEN", ignored("the text of requests is never logged")),
    **named("TRACES_ENABLE TRACES_EXPORTER EXPORTER_OTLP_ENDPOINT EXPORTER_OTLP_HEADERS", ignored(TRACES)),
    **named(
        "ENABLE_V1_KVCACHE_SCHEDULER FILE_BACKEND_STORAGE_DIR FMQ_CONFIG_JSON ZMQ_SEND_BATCH_DATA "
        "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES",
        ignored("it configures FastDeploy's internals"),
    ),
    **named(
        "ENCODE_FEATURE_BOS_AK ENCODE_FEATURE_BOS_SK ENCODE_FEATURE_ENDPOINT",
        ignored("image features are kept in memory, not in an object store"),
    ),
}
