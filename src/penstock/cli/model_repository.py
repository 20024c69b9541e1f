"""A model repository of Triton's with TensorRT-LLM's models: what its ``config.pbtxt`` files say, as flags of ours."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid
from penstock.core.profiles import chosen
from penstock.core.profiles.triton import ONE_ENGINE, switched
from penstock.core.settings import nearest

from .engine_folder import settings_of

logger = logging.getLogger(__name__)

NAMES = ("--model-repository", "--model_repository", "--model-store", "--model-repo", "--model_repo")
MODELS = ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls")
POLICIES = {name: name for name in ("max_utilization", "guaranteed_no_evict")}
BATCHING = {"inflight_fused_batching": "inflight", "inflight_batching": "inflight", "v1": "static"}
GIB = 2**30
BLOCK = 64
"""Tokens of a KV block."""

Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Meaning:
    """What a parameter of a model's configuration means."""

    flags: Callable[[str], Flags] = lambda text: {}
    """Settings here by its value. Raises ``ValueError`` where it is wrong."""
    why: str = ""
    """Why it has no meaning here."""


def setting(name: str, read: Callable[[str], Any] = str) -> Meaning:
    return Meaning(lambda text: {name: read(text)})


def no_meaning(why: str) -> Meaning:
    return Meaning(why=why)


def must_be(allowed: tuple[str, ...], why: str) -> Meaning:
    def read(text: str) -> Flags:
        if text.lower() not in allowed:
            raise ValueError(f"{why}; possible is {' or '.join(allowed)}")
        return {}

    return Meaning(read)


def _blocks(text: str) -> int:
    return max(int(text) // BLOCK, 1)


TOKENIZER = {
    "tokenizer_dir": setting("tokenizer"),
    "tokenizer_type": no_meaning("a tokenizer's files say what it is"),
}
PARAMETERS: Mapping[str, Mapping[str, Meaning]] = {
    "ensemble": {},
    "preprocessing": TOKENIZER
    | {
        "add_special_tokens": must_be(("true",), "prompts begin as the tokenizer has them begin"),
        "engine_dir": no_meaning("the vocabulary's size is the tokenizer's"),
    },
    "postprocessing": TOKENIZER
    | {"skip_special_tokens": must_be(("true",), "special tokens are no text of an answer")},
    "tensorrt_llm_bls": {
        "accumulate_tokens": setting("accumulate_tokens", switched),
        "tensorrt_llm_model_name": must_be(("tensorrt_llm",), "models have the names that they have in TensorRT-LLM"),
        "tensorrt_llm_draft_model_name": must_be((), "a draft model is given with --speculative-config"),
    },
    "tensorrt_llm": {
        "gpt_model_path": setting("engine_dir"),
        "gpt_model_type": setting("batching_type", chosen(BATCHING)),
        "batch_scheduler_policy": setting("batch_scheduler_policy", chosen(POLICIES)),
        "kv_cache_free_gpu_mem_fraction": setting("kv_cache_free_memory_fraction"),
        "max_tokens_in_paged_kv_cache": setting("num_gpu_blocks_override", _blocks),
        "enable_chunked_context": setting("enable_chunked_prefill", switched),
        "enable_kv_cache_reuse": setting("enable_prefix_caching", switched),
        "exclude_input_in_output": setting("exclude_input_in_output", switched),
        "max_beam_width": setting("max_beam_width"),
        "decoding_mode": must_be(
            ("auto", "top_k", "top_p", "top_k_top_p", "beam_search"), "each request says how it decodes"
        ),
        "medusa_choices": must_be((), "there are no Medusa heads; --speculative-config guesses ahead"),
        "eagle_choices": must_be((), "there are no EAGLE heads; --speculative-config guesses ahead"),
        "max_attention_window_size": must_be((), "a model's attention is its own"),
        "sink_token_length": must_be(("0",), "a model's attention is its own"),
        "gpu_device_ids": must_be(("0",), "--device says where the model runs"),
        "kv_cache_host_memory_bytes": setting("swap_space", lambda text: int(text) / GIB),
        "normalize_log_probs": must_be(("true",), "log probabilities are those of a whole distribution"),
        **dict.fromkeys(
            ("kv_cache_onboard_blocks", "enable_trt_overlap", "executor_worker_path", "FORCE_CPU_ONLY_INPUT_TENSORS"),
            no_meaning("it is for TensorRT-LLM's executor"),
        ),
        **dict.fromkeys(
            ("iter_stats_max_iterations", "request_stats_max_iterations", "recv_poll_period_ms"),
            no_meaning("/metrics tells of every step"),
        ),
        "cancellation_check_period_ms": no_meaning("a client that goes is noticed at once"),
        **dict.fromkeys(
            (
                "lora_cache_optimal_adapter_size",
                "lora_cache_max_adapter_size",
                "lora_cache_gpu_memory_fraction",
                "lora_cache_host_memory_bytes",
            ),
            no_meaning("--max-loras and --max-lora-rank say what adapters may take"),
        ),
    },
}
"""By model and the key that the parameter has in its ``config.pbtxt``."""


@dataclass
class Found:
    """What the files say so far."""

    flags: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, flags: Flags, source: str) -> None:
        """Raises ``PenstockError`` (``invalid``) where two files contradict each other."""
        for name, value in flags.items():
            if self.flags.setdefault(name, value) != value:
                raise invalid(source, f"says {value!r}, and {self.sources[name]} {self.flags[name]!r}")
            self.sources.setdefault(name, source)


def expanded(arguments: list[str]) -> list[str]:
    """The arguments of a command with what the repository says in its place, before all others, which override it.

    Raises ``PenstockError`` (``invalid``) for files that cannot be read, and for what they ask for that cannot be.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*NAMES, dest="repository", type=Path)
    given, rest = parser.parse_known_args(arguments[1:])
    if given.repository is None:
        return arguments
    return [arguments[0], *_arguments(read(given.repository)), *rest]


def read(repository: Path) -> Flags:
    """Settings by name. Raises ``PenstockError`` as ``expanded`` does."""
    files = sorted(repository.glob("*/config.pbtxt"))
    if not files:
        raise invalid("model_repository", f"{repository} holds no folder with a config.pbtxt")
    found = Found()
    for file in files:
        _add(found, file)
    engine, tokenizer = found.flags.pop("engine_dir", None), found.flags.get("tokenizer")
    if engine is None:
        raise invalid("model_repository", f"{repository} has no model tensorrt_llm that says where its engine is")
    built = settings_of(Path(engine))
    if "model" not in built:
        built["model"] = _checkpoint(Path(engine), tokenizer)
    return built | found.flags


def _add(found: Found, file: Path) -> None:
    model = _parsed(file)
    name = model.name or file.parent.name
    if name not in MODELS:
        raise invalid(str(file), f"the model {name!r} is none of {', '.join(MODELS)}")
    known = PARAMETERS[name]
    for key, value in sorted(model.parameters.items()):
        text = value.string_value
        if not text or text.startswith("${"):  # not filled
            continue
        source = f"{file}: {key}"
        if key not in known:
            raise invalid(source, f"no such parameter of {name}{nearest(key, known)}")
        if known[key].why:
            _say(source, known[key].why)
            continue
        try:
            found.add(known[key].flags(text), source)
        except ValueError as error:
            raise invalid(source, f"{text!r} is wrong: {error}") from error
    if name == "tensorrt_llm":
        if model.max_batch_size:
            found.add({"max_num_seqs": model.max_batch_size}, f"{file}: max_batch_size")
        if not model.model_transaction_policy.decoupled:
            _say(f"{file}: decoupled", "streams are there for who asks for them")
    if model.dynamic_batching.max_queue_delay_microseconds:
        _say(f"{file}: max_queue_delay_microseconds", "a request joins the next step, and need not wait for others")
    if sum(group.count for group in model.instance_group) > 1:
        _say(f"{file}: instance_group", f"{ONE_ENGINE}; --api-server-count says how many processes handle text")


def _parsed(file: Path) -> Any:
    """A ``ModelConfig``."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        words = "needs classes that are not installed; try pip install 'penstock[grpc]'"
        raise invalid("model_repository", words) from error
    try:
        text = file.read_text(encoding="utf-8")
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(str(file), f"cannot be read: {error}") from error
    except text_format.ParseError as error:
        if unfilled := re.search(r":\s*(\$\{\w+\})", text):
            raise invalid(str(file), f"{unfilled[1]} is not filled; fill_template.py does that") from error
        raise invalid(str(file), f"is no model's configuration: {error}") from error


def _checkpoint(engine: Path, tokenizer: str | None) -> str:
    """The folder with weights that can be read: TensorRT's cannot, but the tokenizer's may be the checkpoint."""
    if _has_weights(engine):
        return str(engine)
    if tokenizer is not None and _has_weights(Path(tokenizer)):
        if engine.exists():
            _say(str(engine), f"an engine is for TensorRT; the checkpoint in {tokenizer} is served")
        return tokenizer
    words = f"{engine} holds no checkpoint of Hugging Face (config.json, *.safetensors)"
    raise invalid("engine_dir", f"{words}, and neither does tokenizer_dir; let one of them be its folder")


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) and not any(folder.glob("rank*"))


def _arguments(flags: Flags) -> Iterator[str]:
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        else:
            yield from (flag, str(value))


def _say(source: str, why: str) -> None:
    logger.warning("%s has no meaning here and is ignored: %s", source, why)
