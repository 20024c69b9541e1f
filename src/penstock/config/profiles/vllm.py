"""Profile of vLLM: flags of ``vllm serve``, which ``penstock serve`` also accepts without a profile.

Flags with the same name and meaning in Penstock are not listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from penstock.core.errors import invalid
from penstock.core.quantization import QuantizationName

from . import (
    COMBINED,
    Alias,
    Profile,
    Settings,
    cuda_graphs,
    ignored,
    json_object,
    on,
    one_of,
    only_value,
    refused,
    vllm_commands,
)
from .vllm_untranslated import COLLECTIVES, IGNORED, NOT_OFFLOADED, REFUSED, SECURITY
from .vllm_variables import LEVELS, PREFIXES, RESTRICTING, VARIABLES
from .vllm_variables import SECURITY as SECURITY_VARIABLES

DTYPES = {name: name for name in ("auto", "float16", "bfloat16", "float32")} | {"half": "float16", "float": "float32"}
BACKEND_OPTIONS = {
    "disable_any_whitespace": "guided_decoding_disable_any_whitespace",
    "disable_additional_properties": "guided_decoding_disable_additional_properties",
}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
PARSERS = {"ernie45": "ernie"}
LENGTHS = "CUDA graphs are captured for sequences of any length"
KV_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
KV_SETTINGS = {
    "kv_ip": "kv_host",
    "kv_port": "kv_port",
    "kv_buffer_size": "kv_buffer_size",
    "kv_load_failure_policy": "kv_load_failure",
}
"""Settings by key of ``--kv-transfer-config``."""
KV_IGNORED = ("engine_id", "kv_buffer_device", "kv_rank", "kv_parallel_size")
"""Ignored keys of ``--kv-transfer-config``, which configure vLLM's connectors."""
EXECUTORS = {"auto": "auto", "uni": "uni", "mp": "mp", "ray": "ray", "external_launcher": "auto"}
"""``distributed_executor_backend`` by vLLM's name."""
MODEL_IMPLS = {"auto": "auto", "vllm": "penstock", "penstock": "penstock", "transformers": "transformers"}
CHECKPOINT_QUANTIZATIONS = (
    "aqlm auto_awq auto_gptq auto-round awq awq_marlin ascend bitblas bitsandbytes compressed-tensors deepseek_v4_fp8 "
    "fbgemm_fp8 fp_quant gguf gpt_oss_mxfp4 gptq gptq_bitblas gptq_marlin gptq_marlin_24 hqq humming inc ipex marlin "
    "modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 petit_nvfp4 qqq quark smoothquant torchao"
).split()
"""Quantization methods of checkpoints. They need no option, as ``config.json`` names them; a format that cannot be read
is rejected at load."""
QUANTIZATIONS = {name: name for name in get_args(QuantizationName)} | dict.fromkeys(CHECKPOINT_QUANTIZATIONS, "none")
QUANTIZATIONS |= {"int8_per_channel_weight_only": "wint8"}
AT_LOAD = dict.fromkeys(
    ("bitsandbytes", "fp_quant", "hqq", "inc", "torchao"),
    "quantized checkpoints are detected from config.json; to quantize weights at load, use wint4, wint8 or w8a8",
)
"""Methods with which vLLM can also quantize at load, and the reason why they have no effect."""
LOAD_FORMATS = {name: name for name in ("auto", "safetensors", "dummy")}
LOAD_FORMATS |= dict.fromkeys(("hf", "pt", "npcache", "gguf", "bitsandbytes"), "auto")
LOAD_FORMATS |= dict.fromkeys(("fastsafetensors", "instanttensor", "modelexpress", "runai_streamer"), "safetensors")
"""``load_format`` by vLLM's name; formats of checkpoints are detected."""
CACHES = {name: name for name in ("auto", "int8", "fp8", "fp8_e4m3")} | {"int8_per_token_head": "int8"}
TASKS = dict.fromkeys(("auto", "none", "generate", "reward", "draft", "token_embed", "token_classify"), "auto")
TASKS |= {"embed": "embed", "embedding": "embed", "classify": "classify", "score": "score"}
"""``pooling_task`` by vLLM's task; "reward" becomes "auto", which detects the classifier."""
POOLING_TYPES = {name: name for name in ("last", "cls", "mean", "all")}


def size(text: str) -> int:
    """Parse a number with a unit, as vLLM: ``25k`` is 25,000, ``25K`` is 25,600. Raises ``ValueError``."""
    result = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if not result or ("." in result[1] and not result[2].islower()):
        raise ValueError("it is not a number such as 4096, 4k or 4K")
    return int(float(result[1]) * UNITS[result[2]]) if "." in result[1] else int(result[1]) * UNITS[result[2]]


def _length(text: str) -> int:
    """Parse a context length; ``auto`` and -1 are 0: the model's context length."""
    return 0 if text in ("auto", "-1") else size(text)


def origins(text: str) -> tuple[str, ...]:
    """Parse a list in JSON, or separated by commas."""
    if not text.startswith("["):
        return tuple(text.split(","))
    result = json.loads(text)
    return tuple(map(str, result))


def _kv_transfer(text: str) -> Mapping[str, Any]:
    """Translate ``--kv-transfer-config``: the role of an instance, and its transport with ``NixlConnector``; or the
    host tier of the prefix cache with ``OffloadingConnector``."""
    result = {name: value for name, value in json_object(text).items() if name not in KV_IGNORED}
    connector, role = result.pop("kv_connector", ""), result.pop("kv_role", "")
    if connector == "OffloadingConnector":
        size = (result.get("kv_connector_extra_config") or {}).get("cpu_bytes_to_use")
        if not isinstance(size, int | float):
            raise ValueError("kv_connector_extra_config must have cpu_bytes_to_use; or use --kv-offloading-size")
        return {"kv_offloading_size": size / 2**30}
    if role not in KV_ROLES:
        raise ValueError("kv_role must be kv_producer or kv_consumer; omit this flag for an instance with both roles")
    if unknown := set(result) - set(KV_SETTINGS):
        known = f"kv_connector, kv_role, {', '.join(KV_SETTINGS)}"
        raise ValueError(f"{min(unknown)} is not supported; supported keys: {known}")
    transport = {"kv_transport": "nixl"} if connector == "NixlConnector" else {}
    return {"role": KV_ROLES[role]} | transport | {KV_SETTINGS[name]: value for name, value in result.items()}


def _structured(text: str) -> Mapping[str, Any]:
    result = json_object(text)
    backend = str(result.pop("backend", "auto")).lower()
    if unknown := set(result) - set(BACKEND_OPTIONS):
        raise ValueError(f"{min(unknown)} is not supported; supported keys: backend, {', '.join(BACKEND_OPTIONS)}")
    return {"guided_decoding_backend": backend} | {BACKEND_OPTIONS[name]: value for name, value in result.items()}


def _backend(text: str) -> Mapping[str, Any]:
    """Parse a backend with options after a colon: ``xgrammar:disable-any-whitespace``."""
    name, _, given = text.partition(":")
    result: dict[str, Any] = {"guided_decoding_backend": name.lower()}
    for option in filter(None, given.split(",")):
        if option == "no-fallback":  # no effect, as no backend has a fallback
            continue
        if (known := option.replace("-", "_")) not in BACKEND_OPTIONS:
            raise ValueError(f"{option} is not supported; supported options: {', '.join(BACKEND_OPTIONS)}")
        result[BACKEND_OPTIONS[known]] = True
    return result


def _nullable(text: str) -> str:
    return "" if text == "None" else text


def together(given: Mapping[str, str]) -> Settings:
    """Yield settings that depend on several flags: tokenizer revision, speculative decoding."""
    revision = _nullable(given.get("--tokenizer_revision", ""))
    if revision and revision != given.get("--revision", "main"):
        message = f"must equal --revision, is {revision!r}; for another tokenizer, set --tokenizer to its folder"
        raise invalid("--tokenizer_revision", message)
    yield from _speculative(given)


def _speculative(given: Mapping[str, str]) -> Settings:
    found: dict[str, tuple[str, Any]] = {}
    for name, key in SPECULATIVE.items():
        if (text := given.get(f"--{name}")) in (None, "None"):
            continue
        value: Any = text
        if key not in ("model", "method"):
            if not text.isdecimal():
                raise invalid(f"--{name}", f"{text!r} is not a number")
            value = int(text)
        if key in found:
            raise invalid(f"--{name}", f"has the same meaning as {found[key][0]}: set only one of them")
        found[key] = (f"--{name}", value)
    if not found:
        return
    source = next(iter(found.values()))[0]
    if "--speculative_config" in given:
        raise invalid(source, "cannot be combined with --speculative-config: unset one of them")
    result = {key: value for key, (_, value) in found.items()}
    if "model" not in result and "method" not in result:
        raise invalid(source, "requires --speculative-model")
    if result.get("model") == "[ngram]":
        result |= {"method": "ngram"}
        del result["model"]
    elif "model" in result:
        result.setdefault("method", "draft_model")
    yield "speculative_config", json.dumps(result), source


def _generation(text: str) -> Mapping[str, Any]:
    """Translate ``override_generation_config``; its ``max_new_tokens`` limits all requests, as in vLLM."""
    result = json_object(text or "{}")
    limit = {"max_output_len": result.pop("max_new_tokens")} if "max_new_tokens" in result else {}
    return {"override_generation_config": json.dumps(result) if result else "", **limit}


def pooler(text: str) -> Mapping[str, Any]:
    """Translate ``--pooler-config`` (JSON) to pooling options. Raises ``ValueError`` for unsupported keys."""
    settings: dict[str, Any] = {}
    for name, value in json_object(text).items():
        if value is None or (name, value) == ("enable_chunked_processing", False):
            continue
        if name in ("pooling_type", "seq_pooling_type", "tok_pooling_type"):
            settings["pooling_type"] = one_of(POOLING_TYPES)(str(value))
        elif name in ("normalize", "softmax", "activation", "use_activation"):
            settings["pooling_activation"] = "on" if value else "off"
        elif name == "task":
            settings["pooling_task"] = one_of(TASKS)(str(value))
        else:
            raise ValueError(f"{name} is not supported; supported keys: pooling_type, normalize, use_activation, task")
    return settings


def _overrides(text: str) -> Mapping[str, Any]:
    """Translate ``hf_overrides`` of a generative reranker (Qwen3-Reranker); other overrides are rejected."""
    given = json_object(text)
    given.pop("architectures", None)
    given.pop("is_original_qwen3_reranker", None)
    tokens = given.pop("classifier_from_token", None)
    if given or not (isinstance(tokens, list) and len(tokens) == 2):
        raise ValueError("only classifier_from_token with two tokens (Qwen3-Reranker) can be overridden")
    return {"pooling_task": "score", "classifier_tokens": tuple(map(str, tokens))}


def _compilation(text: str) -> Mapping[str, Any]:
    """Translate the CUDA graph options of ``--compilation-config``; optimization levels (``-O3``) have no effect."""
    return {} if re.fullmatch(r"\d", text) else cuda_graphs.read_json(text, "cudagraph_mode", ("none", "0"))


def _eplb(text: str) -> Mapping[str, Any]:
    """Translate ``--eplb-config`` (JSON). Raises ``ValueError`` for unsupported keys."""
    names = {"num_redundant_experts": "num_redundant_experts", "log_balancedness": "expert_load"}
    given = json_object(text)
    if unknown := set(given) - set(names):
        raise ValueError(f"{min(unknown)} is not supported; supported keys: {', '.join(names)}")
    return {names[name]: value for name, value in given.items()}


SPECULATIVE = {
    "speculative_model": "model",
    "spec_model": "model",
    "spec_method": "method",
    "num_speculative_tokens": "num_speculative_tokens",
    "spec_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
"""Keys of ``speculative_config`` by flag."""

FLAGS: Mapping[str, Alias] = {
    "dtype": Alias("dtype", one_of(DTYPES)),
    **IGNORED,
    **REFUSED,
    **SECURITY,
    "quantization": Alias("quantization", one_of(QUANTIZATIONS), short="-q", without_effect=AT_LOAD),
    "kv_cache_dtype": Alias("kv_cache_dtype", one_of(CACHES)),
    "load_format": Alias("load_format", one_of(LOAD_FORMATS)),
    "max_model_len": Alias("max_model_len", _length),
    "max_num_batched_tokens": Alias("max_num_batched_tokens", size),
    "kv_cache_memory_bytes": Alias("kv_cache_memory_bytes", size),
    "tool_call_parser": Alias("tool_call_parser", lambda text: PARSERS.get(text, text)),
    "reasoning_parser": Alias("reasoning_parser", lambda text: PARSERS.get(text, text)),
    "override_generation_config": Alias(read=_generation),
    "guided_decoding_backend": Alias(read=_backend),
    "structured_outputs_config": Alias(read=_structured),
    "otlp_traces_endpoint": Alias("otlp_endpoint"),
    "uvicorn_log_level": Alias("log_level", one_of(LEVELS)),
    "allowed_origins": Alias("allowed_origins", origins),
    "tensor_parallel_size": Alias("tensor_parallel_size", short="-tp"),
    "pipeline_parallel_size": Alias("pipeline_parallel_size", short="-pp"),
    "data_parallel_size": Alias("data_parallel_size", short="-dp"),
    "decode_context_parallel_size": only_value("1", COLLECTIVES, short="-dcp"),
    "nnodes": Alias("nnodes", short="-n"),
    "node_rank": Alias("node_rank", short="-r"),
    "headless": Alias(read=lambda text: {}, switch=True),  # nodes other than node 0 are always headless
    "cpu_offload_gb": only_value("0", NOT_OFFLOADED),
    "tokenizer_mode": refused("only auto, hf and slow are supported, with one meaning", unless=("auto", "hf", "slow")),
    "config_format": refused("only config.json is supported: set auto or hf", unless=("auto", "hf")),
    "model_impl": Alias("model_impl", one_of(MODEL_IMPLS)),
    "response_role": only_value("assistant", "the role of responses cannot be changed"),
    "chat_template_content_format": only_value("auto", "the format is detected from the chat template"),
    "logprobs_mode": only_value("raw_logprobs", "logprobs are computed from the model's logits"),
    "stream_interval": only_value("1", "each token is sent immediately"),
    "lora_dtype": only_value("auto", "adapters are computed in the model's data type"),
    "kv_transfer_config": Alias(read=_kv_transfer),
    "kv_offloading_backend": only_value("native", "prefixes can be offloaded to host memory and a folder only"),
    "enable_sleep_mode": ignored("all engines can sleep; --server-dev-mode lets clients request it", switch=True),
    "enable_expert_parallel": Alias("enable_expert_parallel", on, switch=True, short="-ep"),
    "enable_eplb": refused(
        "experts are not rebalanced at run time: measure with --expert-load, plan with penstock plan experts, and "
        "place experts with --expert-placement at the start",
        switch=True,
    ),
    "eplb_config": Alias(read=_eplb),
    "expert_placement_strategy": only_value("linear", "use --expert-placement for other placements"),
    "distributed_executor_backend": Alias("distributed_executor_backend", one_of(EXECUTORS)),
    "max_cudagraph_capture_size": Alias("cudagraph_capture_sizes", cuda_graphs.up_to),
    "max_seq_len_to_capture": ignored(LENGTHS),
    "max_context_len_to_capture": ignored(LENGTHS),
    "compilation_config": Alias(read=_compilation, short="-O -cc"),
    "speculative_config": Alias("speculative_config", short="-sc"),
    **dict.fromkeys(SPECULATIVE, COMBINED),
    "api_server_count": Alias("api_server_count", short="-asc"),
    "shutdown_timeout": Alias("drain_timeout"),
    "revision": Alias("revision", _nullable),
    "tokenizer_revision": COMBINED,
    "async_scheduling": ignored("set --max-concurrent-batches 2 to schedule steps ahead", switch=True),
    "runner": ignored("the tasks of a model are detected from its checkpoint"),
    "task": Alias("pooling_task", one_of(TASKS)),
    "convert": Alias("pooling_task", one_of(TASKS)),
    "pooler_config": Alias(read=pooler),
    "override_pooler_config": Alias(read=pooler),
    "hf_overrides": Alias(read=_overrides),
    "enable_auto_tool_choice": ignored("tool calls are always parsed", switch=True),
    "enable_prompt_tokens_details": ignored("usage always has prompt_tokens_details", switch=True),
    "enable_request_id_headers": ignored("all responses have X-Request-Id", switch=True),
    "language_model_only": ignored("vision models also accept text-only requests", switch=True),
}

PROFILE = Profile(
    name="vllm",
    title="vLLM",
    flags=FLAGS,
    variables=VARIABLES,
    prefixes=PREFIXES,
    together=together,
    commands=vllm_commands.VLLM_COMMANDS,
)

DEFAULT_PROFILE = Profile(
    name="",
    title="vLLM, accepted without --compat",
    flags=FLAGS,
    variables={**dict.fromkeys(SECURITY_VARIABLES, ignored("it is read with --compat vllm only")), **RESTRICTING},
    together=together,
    commands=vllm_commands.COMMANDS,
)
"""Profile of the command line without ``--compat``: from the environment, it reads only variables that protect the
server."""
