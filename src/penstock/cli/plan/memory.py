"""``penstock plan memory``: memory of a model on one device."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.kv_spec import KVSpec, bytes_per_token
from penstock.checkpoint.state_spec import bytes_per_slot
from penstock.cli.flags import add_model, add_options, configure
from penstock.cli.screen import print_json
from penstock.config.options import Configuration, EngineOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core.errors import invalid
from penstock.core.expert_placement import num_redundant_experts
from penstock.planning.host_memory import FREE_SHARE, free_host_bytes
from penstock.planning.kv_size import (
    CachePlan,
    block_ratio,
    blocks_of_sequences,
    kv_cache_ratio,
    kv_specs,
    weight_bytes,
)
from penstock.planning.model_size import ModelSize, model_size_of
from penstock.planning.pipeline import split_layers, stage_weight_bytes

GB, GIB = 1e9, 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON, in bytes, tokens and blocks")
    group = parser.add_argument_group("workload and device")
    group.add_argument(
        "--input-len", type=float, default=768, metavar="TOKENS", help="mean prompt length (default: 768)"
    )
    group.add_argument(
        "--output-len", type=float, default=256, metavar="TOKENS", help="mean output length (default: 256)"
    )
    ratio = "EXTEND_RATIO of PaddleNLP: 1.1 to 1.3 if the lengths of prompts vary a lot (default: 1)"
    group.add_argument("--extend-ratio", type=float, default=1.0, help=ratio)
    group.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU (default: plan for this host)")
    group.add_argument(
        "--activation-memory", type=float, default=0.0, metavar="GIB", help="memory for activations (default: 0)"
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "extend_ratio"):
        if not getattr(args, name) > 0:
            raise invalid(name, f"must be above 0, is {getattr(args, name):g}", 0)
    result = plan(args, configure(args).configuration)
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0


def plan(args: argparse.Namespace, configuration: Configuration) -> dict[str, Any]:
    """Results by name. Raises ``PenstockError`` if the model cannot be read, or no KV block fits."""
    from penstock.engine.draft_folder import draft_size
    from penstock.engine.kv.memory import count_snapshots
    from penstock.engine.step import MemoryProfile
    from penstock.frontend.downloads import Selection
    from penstock.frontend.hub import resolve_draft, resolve_source

    options = configuration.engine
    selection = Selection(include=["config.json"])
    folder = resolve_source(options.model, configuration.model, progress=sys.stderr.isatty(), selection=selection)
    size = model_size_of(read_config_json(folder))
    size = size.with_redundant_experts(num_redundant_experts(options.expert_placement, options.num_redundant_experts))
    if args.gpu_memory is None:
        size = size.on_cpu()
    speculative = SpeculativeConfig.read(resolve_draft(options.speculative_config)) if options.speculation else None
    mtp = bool(speculative and speculative.method == "mtp")
    quantization = size.quantization if options.quantization == "none" else options.quantization
    ranks, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    split = split_layers(size, stages, options.pipeline_parallel_layers, quantization, options.dtype)
    weights = max(stage_weight_bytes(size, layers, quantization, options.dtype, mtp) for layers in split)
    specs = kv_specs(size, options.block_size, options.kv_cache_dtype, options.dtype, mtp, ranks)
    token = max(bytes_per_token(each) for each in _specs_of_stages(size, specs, split))
    if draft := draft_size(speculative, str(folder), size):
        draft = draft if args.gpu_memory else draft.on_cpu()
        weights += weight_bytes(draft, quantization, options.dtype)
        cache_dtype = options.kv_cache_dtype
        token += bytes_per_token(kv_specs(draft, options.block_size, cache_dtype, options.dtype, ranks=ranks))
    weights //= ranks
    longest = options.max_model_len or size.max_model_len
    state = bytes_per_slot(size.states, speculative.max_draft_len if speculative else 0) // (ranks * stages)
    states = state * (options.max_num_seqs + 1)
    room = _room(args, options, weights + states)
    snapshots = count_snapshots(options, MemoryProfile(max(room, 0), 0, token, token, state))
    room -= snapshots * state
    blocks = _blocks(options, longest, room, token * options.block_size)
    cache = CachePlan(blocks, options.block_size, token, longest, options.kv_cache_ratio)
    prompt, output = args.input_len, args.output_len
    ratio = kv_cache_ratio(prompt, output)
    recommended = CachePlan(blocks, options.block_size, token, longest, ratio)
    return {
        "model": str(folder),
        "architecture": size.architecture,
        "max_model_len": longest,
        "ranks": ranks * stages,
        "weight_bytes": weights,
        "kv_bytes_per_token": token,
        "kv_bytes_per_block": token * options.block_size,
        "state_bytes_per_sequence": state,
        "state_bytes": states,
        "state_snapshots": snapshots,
        "state_snapshot_bytes": snapshots * state,
        "room_bytes": room,
        "kv_cache_bytes": cache.bytes,
        "block_size": options.block_size,
        "total_block_num": cache.blocks,
        "total_tokens": cache.tokens,
        "kv_cache_sequences": round(cache.sequences, 2),
        "prefill_kvcache_block_num": cache.prompt_blocks,
        "input_len": prompt,
        "output_len": output,
        "recommended": {
            "kv_cache_ratio": round(ratio, 3),
            "block_ratio": round(block_ratio(prompt, output, args.extend_ratio), 3),
            "max_num_seqs": recommended.max_num_seqs(output),
            "batch_size": cache.batch_size(prompt, output),
        },
    }


def _specs_of_stages(size: ModelSize, specs: list[KVSpec], stages: list[range]) -> list[list[KVSpec]]:
    """KV cache specs of the layers of each pipeline stage. Of a model without attention in some layers, each stage is
    assumed to have as many layers with attention as possible."""
    if len(stages) == 1:
        return [specs]
    if size.kv_shapes or size.shared_layers:
        return [specs[layers.start : layers.stop] for layers in stages]
    return [specs[: len(layers)] for layers in stages]


def _room(args: argparse.Namespace, options: EngineOptions, weights: int) -> int:
    """Bytes for the KV cache, as the engine computes them after loading the weights."""
    if options.kv_cache_memory_bytes:
        return options.kv_cache_memory_bytes
    reserved = int(args.activation_memory * GIB)
    if args.gpu_memory is not None:
        return int(args.gpu_memory * GIB * options.gpu_memory_utilization) - weights - reserved
    share = 1 if options.kv_cache_sequences else FREE_SHARE
    swapped = int(options.swap_space * GIB) if options.preemption_mode == "swap" else 0
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size // options.nnodes
    processes = max(ranks, 1) * options.data_parallel_size
    offloaded = options.host_tier_bytes // max(ranks, 1)
    return int((free_host_bytes() // processes - weights - reserved) * share) - swapped - offloaded


def _blocks(options: EngineOptions, longest: int, room: int, size: int) -> int:
    """Number of KV blocks, from the same options with the same precedence as in the engine (``engine.kv.memory``)."""
    if options.num_gpu_blocks_override:
        return options.num_gpu_blocks_override
    if not size:  # no layer has keys and values
        return blocks_of_sequences(2 * options.max_num_seqs, longest, options.block_size)
    if options.kv_cache_sequences and not options.kv_cache_memory_bytes:
        return blocks_of_sequences(options.kv_cache_sequences, longest, options.block_size)
    if room < size:
        needed = f"less than one KV block ({size / GB:.4f} GB): use more memory or ranks, or quantize the weights"
        raise invalid("model", f"its weights leave {room / GB:.2f} GB, {needed}")
    return room // size


def _print(result: dict[str, Any]) -> None:
    cache_bytes, advice = result["kv_cache_bytes"], result["recommended"]
    lengths = f"{result['input_len']:g} + {result['output_len']:g} tokens"
    rows = [
        ("model", f"{result['model']} ({result['architecture']})", ""),
        ("max_model_len", f"{result['max_model_len']:,} tokens", ""),
        *([("ranks", f"{result['ranks']}", "bytes are per rank")] if result["ranks"] > 1 else []),
        ("weights", _size(result["weight_bytes"]), ""),
        ("KV per token", f"{result['kv_bytes_per_token']:,} bytes", ""),
        ("KV per block", f"{result['kv_bytes_per_block']:,} bytes", f"{result['block_size']} tokens"),
        *_state_rows(result),
        ("room for KV cache", _size(result["room_bytes"]), "too little" if cache_bytes > result["room_bytes"] else ""),
        ("KV cache", _size(cache_bytes), ""),
        ("blocks", f"{result['total_block_num']:,}", "total_block_num"),
        ("tokens", f"{result['total_tokens']:,}", "NUM_TOTAL_TOKEN"),
        ("longest sequences", f"{result['kv_cache_sequences']:g}", "kv_cache_sequences, BLOCK_BS"),
        ("blocks for prompts", f"{result['prefill_kvcache_block_num']:,}", "prefill_kvcache_block_num"),
        (f"for {lengths}:", "", ""),
        ("  kv_cache_ratio", f"{advice['kv_cache_ratio']:g}", "FastDeploy"),
        ("  kv_cache_ratio", f"{advice['block_ratio']:g}", "PaddleNLP's BLOCK_RATIO"),
        ("  max_num_seqs", f"{advice['max_num_seqs']}", "FastDeploy, with its ratio"),
        ("  max_num_seqs", f"{advice['batch_size']}", "PaddleNLP's BATCH_SIZE, at most"),
    ]
    for name, value, note in rows:
        print(f"{name:<20} {value:<24} {note}".rstrip())


def _state_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the recurrent states; none for models without them."""
    if not result["state_bytes"]:
        return []
    return [
        ("state per sequence", _size(result["state_bytes_per_sequence"]), ""),
        ("states", _size(result["state_bytes"]), "of max_num_seqs sequences"),
        ("state snapshots", _size(result["state_snapshot_bytes"]), f"{result['state_snapshots']:,} snapshots"),
    ]


def _size(count: int) -> str:
    return f"{count / GB:.2f} GB" if abs(count) >= GB / 10 else f"{count / 1e6:.2f} MB"
