"""Help of commands with many options: common ones, a topic (``--help=kv-cache``), a search (``--help=max``), or all
(``--help=all``)."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

from penstock.config.profiles.vllm import DEFAULT_PROFILE

from .parser import PROFILE_PREFIX, Parser

COMMON = (
    "model host port api_key served_model_name max_model_len dtype quantization device gpu_memory_utilization "
    "kv_cache_memory_bytes max_num_seqs max_num_batched_tokens tensor_parallel_size data_parallel_size "
    "speculative_config chat_template tool_call_parser reasoning_parser compat log_level"
).split()
"""Options of the short help."""


class Topic(NamedTuple):
    """Options about a subject."""

    about: str
    names: Sequence[str]


def _topic(about: str, names: str) -> Topic:
    return Topic(about, names.split())


TOPICS: Mapping[str, Topic] = {
    "model": _topic(
        "the model: source, name, type of numbers, quantization, tokenizer",
        "model model_impl model_hub revision hf_token download_dir load_format dtype quantization tokenizer "
        "served_model_name require_model weight_cache_dir weight_cache_size seed",
    ),
    "models": _topic("several models in one server", "models model_control_mode load_model model_idle_timeout"),
    "device": _topic(
        "processor, GPU and kernels",
        "device ops threads cpu_binding enforce_eager cudagraph_capture_sizes batch_invariant use_warmup",
    ),
    "kv-cache": _topic(
        "memory of the KV cache, prefix caching, swapping and offloading",
        "gpu_memory_utilization kv_cache_free_memory_fraction kv_cache_memory_bytes kv_cache_sequences kv_cache_dtype "
        "block_size num_gpu_blocks_override num_state_snapshots kv_cache_ratio static_decode_blocks "
        "enable_prefix_caching share_prefix_cache preemption_mode swap_space kv_offloading_size "
        "kv_offloading_disk_path kv_offloading_disk_size encoder_cache_size",
    ),
    "scheduling": _topic(
        "batches, chunked prefill, queue and priorities",
        "max_num_seqs max_num_batched_tokens max_waiting max_queue_time max_concurrency scheduling_policy "
        "batch_scheduler_policy batching_type enable_chunked_prefill max_num_partial_prefills "
        "max_long_partial_prefills long_prefill_token_threshold max_concurrent_batches",
    ),
    "limits": _topic(
        "limits of requests: lengths, sizes and times",
        "max_model_len max_prompt_len max_output_len max_logprobs enable_logprob max_beam_width max_logits_size "
        "request_timeout max_body_size max_body_memory max_header_size strict_requests",
    ),
    "chat": _topic(
        "chat templates, tool calls, reasoning, default sampling, guided decoding",
        "chat_template trust_request_chat_template allow_special_tokens_in_content tool_call_parser tool_strictness "
        "reasoning_parser generation_config override_generation_config template_text guided_decoding_backend "
        "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties",
    ),
    "speculation": _topic("speculative decoding", "speculative_config speculation"),
    "lora": _topic("LoRA adapters", "enable_lora lora_modules max_loras max_lora_rank allow_runtime_lora_updating"),
    "multimodal": _topic(
        "images, videos and audio",
        "limit_mm_per_prompt mm_processor_kwargs media_io_kwargs allowed_media_domains allowed_local_media_path "
        "max_image_size max_image_pixels media_timeout max_video_size max_video_frames max_video_pixels video_timeout "
        "max_audio_size max_audio_duration audio_timeout",
    ),
    "pooling": _topic(
        "embeddings, rerankers and classifiers",
        "pooling_type pooling_task pooling_activation classifier_tokens",
    ),
    "parallel": _topic(
        "several ranks, nodes, replicas and experts",
        "tensor_parallel_size pipeline_parallel_size pipeline_parallel_layers data_parallel_size "
        "data_parallel_request_cost enable_expert_parallel expert_parallel_size expert_placement "
        "num_redundant_experts expert_load nnodes node_rank node_ports master_addr master_port cluster_secret_file "
        "node_timeout distributed_executor_backend",
    ),
    "disaggregation": _topic(
        "prefill and decode instances, and their router",
        "role prefill_instances decode_instances router_address engine_address global_rank_table rank_table "
        "pd_min_prefill_tokens kv_host kv_port kv_advertised_address kv_load_failure kv_buffer_size kv_timeout "
        "kv_transport allow_fingerprint_mismatch",
    ),
    "http": _topic(
        "addresses, TLS, processes, dialects of other systems",
        "host port health_port metrics_port grpc_port root_path ssl_certfile ssl_keyfile allowed_origins web "
        "api_server_count timeout_keep_alive compat metrics_aliases exclude_input_in_output allow_shared_memory "
        "accumulate_tokens disable_streaming",
    ),
    "security": _topic("keys and administration", "api_key admin_api_key server_dev_mode allowed_local_weights_path"),
    "failures": _topic(
        "time limits of processes, restarts, continued requests",
        "drain_timeout engine_iteration_timeout client_timeout api_process_timeout resume resume_timeout "
        "resume_across_fingerprints",
    ),
    "storage": _topic(
        "stored conversations, files and batches",
        "storage_dir storage_url storage_retention storage_quota storage_limit max_conversation_items "
        "max_conversation_bytes max_file_size batch_concurrency",
    ),
    "mcp": _topic(
        "tools of MCP servers",
        "mcp_config allow_mcp_urls mcp_timeout mcp_max_rounds mcp_max_result_size mcp_max_connections",
    ),
    "log": _topic("log and traces", "log_level log_format log_file otlp_endpoint trace_sampling_ratio"),
}
"""Topics by name. Each option is in exactly one of them."""
PROFILE_TOPIC = "compat"
"""Topic of the flags of another system (``--compat``)."""
OWN_OPTIONS = "options of this command"
"""Title of the options that only one command has, which its short help shows."""
NUM_SHORT = 20
"""Number of options of a command for which the help is not shortened."""


class TopicHelp(argparse.Action):
    """``--help``, ``--help=TOPIC``, ``--help=TEXT`` or ``--help=all``."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None) -> None:
        assert isinstance(parser, Parser)
        status, text = _help(parser, values or "")
        if status:
            parser.error(text)
        print(text, end="")
        parser.exit()


def add_topic_help(parser: argparse.ArgumentParser) -> None:
    """Replace ``--help`` of a parser by ``TopicHelp``."""
    about = "Show common options; --help=kv-cache: options of a topic; --help=TEXT: search; --help=all: all options."
    parser.add_argument(
        "-h", "--help", action=TopicHelp, nargs="?", const="", default=argparse.SUPPRESS, metavar="TOPIC", help=about
    )


def _help(parser: Parser, topic: str) -> tuple[int, str]:
    """Exit status and text."""
    options = [action for group in parser._action_groups[2:] for action in group._group_actions]
    if topic == "all" or (not topic and len(options) <= NUM_SHORT):
        return 0, parser.format_help()
    of_profile = [action for action in options if action.dest.startswith(PROFILE_PREFIX)]
    profile = parser.get_default("profile")
    profile_title = f"options of {profile.title if profile else 'another system'}"
    if not topic and profile in (None, DEFAULT_PROFILE):
        return 0, _short(parser, options)
    if not topic:  # a user of another system looks for its flags
        return 0, f"{_short(parser, options)}\n{_section(parser, profile_title, of_profile)}"
    if topic in TOPICS:
        found = _named(options, TOPICS[topic].names)
        title = f"{topic}: {TOPICS[topic].about}"
    elif topic == PROFILE_TOPIC:
        found, title = of_profile, profile_title
    else:
        found = [action for action in options if _matches(action, topic)]
        title = f"options with {topic!r} in their name or help"
    if found:
        return 0, _section(parser, title, found)
    names = [name for name in (*TOPICS, PROFILE_TOPIC, "all") if name != topic]
    near = difflib.get_close_matches(topic, names, 1)
    hint = f"did you mean --help={near[0]}?" if near else f"topics: {', '.join(TOPICS)}"
    return 2, f"--help={topic}: no topic of this name, and no option with this text; {hint}"


def _named(options: Sequence[argparse.Action], names: Sequence[str]) -> list[argparse.Action]:
    """The options with these names, in this order."""
    by_name = {action.dest.removeprefix(PROFILE_PREFIX): action for action in reversed(options)}
    return [by_name[name] for name in names if name in by_name]


def _matches(action: argparse.Action, text: str) -> bool:
    """True if the name or the help of an option contains a text. ``-`` and ``_`` are equal."""
    if action.help == argparse.SUPPRESS:
        return False
    wanted = text.lower().lstrip("-").replace("-", "_")
    return any(wanted in each.lower().replace("-", "_") for each in (*action.option_strings, action.help or ""))


def _section(parser: Parser, title: str, options: Sequence[argparse.Action]) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title)
    formatter.add_arguments(options)
    formatter.end_section()
    return formatter.format_help()


def _short(parser: Parser, options: Sequence[argparse.Action]) -> str:
    """Usage, the command's own arguments, common options with the first words of their help, and topics."""
    parser.shorten_usage()
    own_groups = [group for group in parser._action_groups[2:] if group.title == OWN_OPTIONS]
    own = [action for group in (*parser._action_groups[:2], *own_groups) for action in group._group_actions]
    rows = [(_invocation(action), _first_words(action)) for action in (*own, *_named(options, COMMON))]
    topics = {name: len(_named(options, topic.names)) for name, topic in TOPICS.items()}
    about = [(name, f"{TOPICS[name].about} ({count})") for name, count in topics.items() if count]
    profile = parser.get_default("profile")
    if count := sum(action.dest.startswith(PROFILE_PREFIX) for action in options if action.help != argparse.SUPPRESS):
        about.append((PROFILE_TOPIC, f"flags of {profile.title} ({count})"))
    return "\n".join(
        (
            parser.format_usage().rstrip(),
            "",
            str(parser.description),
            "",
            "common options:",
            *_table(rows),
            "",
            "topics: --help=TOPIC; --help=TEXT searches names and help; --help=all shows all options",
            *_table(about),
            "",
        )
    )


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    long = [name for name in action.option_strings if name.startswith("--") and "_" not in name]
    flag = (long or action.option_strings)[0 if isinstance(action, argparse.BooleanOptionalAction) else -1]
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices or metavar.startswith("{"):
        metavar = flag.rpartition("-")[2].upper()
    return f"{flag} {metavar}".rstrip()


def _first_words(action: argparse.Action) -> str:
    """The first sentence, or its part before a colon or semicolon."""
    text = (action.help or "").replace("%%", "%").replace("(default: empty)", "")
    return re.split(r"[:;.](?:\s|\Z)| \((?:\w+, )?default", text, maxsplit=1)[0].strip()


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of names and texts, which are shortened to the width of the terminal."""
    column = max(len(name) for name, _ in rows) + 4
    width = max(shutil.get_terminal_size().columns - column, 20)
    return [f"  {name}".ljust(column) + shorten(about, width, placeholder=" …") for name, about in rows]
