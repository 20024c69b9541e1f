"""Flags of FastDeploy (2.0 to 2.5) without an equivalent: ignored or rejected, with a reason."""

from __future__ import annotations

from collections.abc import Mapping

from . import Alias, ignored, named, only_value, refused

COLLECTIVES = "ranks gather outputs in shared memory, and over TCP between machines"
NO_CODE = "loading code is not supported"
SCHEDULER = "requests are distributed by a router, not through Redis: start one and set --router"
EXPERTS = "--enable-expert-parallel distributes whole experts over the ranks"
PRECISION = "this layer is computed in the model's data type"

FLAGS: Mapping[str, Alias] = {
    **named("tool_parser_plugin model_config_name", refused(NO_CODE)),
    "logits_processors": refused(NO_CODE, several=True),
    "tokenizer_base_url": refused("a tokenizer service is not supported; the server tokenizes texts"),
    "rsync_config": refused("update weights from a folder: POST /v1/weights/reload", unless=("{}", "null")),
    "routing_replay_config": refused("use --expert-load and /expert_load for expert loads", unless=("{}", "null")),
    "model_loader_extra_config": refused("weights are read from safetensors files", unless=("{}", "null", "none")),
    "plas_attention_config": refused("sparse attention is not supported", unless=("{}", "null")),
    "kvcache_storage_backend": refused("use --kv-offloading-disk-path to store prefixes on disk"),
    "write_policy": only_value("write_through", "prefixes are written when their blocks are full"),
    "logprobs_mode": only_value("raw_logprobs", "logprobs are computed from the model's logits"),
    "early_stop_config": refused("sequences that repeat themselves are not stopped", unless=("{}", "null")),
    "enable_early_stop": refused("sequences that repeat themselves are not stopped", switch=True),
    "enable_mm_output": refused("only text output is supported", switch=True),
    "enable_eplb": refused("use --expert-placement to place experts at the start", switch=True),
    "eplb_config": refused("use --expert-placement to place experts at the start", unless=("{}", "null")),
    "local_data_parallel_id": only_value("0", "all engines of --data-parallel-size are started together"),
    "enable_entropy": ignored("the entropy of outputs is not logged", switch=True),
    "enable_output_caching": ignored("--enable-prefix-caching caches outputs, too"),
    "enable_overlap_schedule": ignored("--max-concurrent-batches schedules steps ahead"),
    "enable_custom_all_reduce": ignored(COLLECTIVES, switch=True),
    "disable_custom_all_reduce": ignored(COLLECTIVES, switch=True),
    "enable_chunked_moe": ignored(EXPERTS, switch=True),
    "chunked_moe_size": ignored(EXPERTS),
    **named(
        "disable_sequence_parallel_moe ep_prefill_use_worst_num_tokens use_internode_ll_two_stage",
        ignored(EXPERTS, switch=True),
    ),
    **named("lm_head_fp32 moe_gate_fp32", ignored(PRECISION, switch=True)),
    "disable_chunked_mm_input": ignored("an image is encoded once, even if its prompt is chunked", switch=True),
    "deploy_modality": ignored("vision models also accept text-only requests"),
    "load_strategy": ignored("weights are updated from a folder: POST /v1/weights/reload"),
    "runner": ignored("the tasks of a model are detected from its checkpoint"),
    "max_encoder_cache": ignored("--encoder-cache-size sets the size of the image feature cache"),
    "max_processor_cache": ignored("image features are cached instead (--encoder-cache-size)"),
    "prealloc_dec_block_slot_num_threshold": ignored("--static-decode-blocks reserves blocks"),
    "shutdown_comm_group_if_worker_idle": ignored(COLLECTIVES),
    "controller_port": ignored("all routes are served on --port"),
    "enable_mm": ignored("detected from the model's config.json (deprecated in FastDeploy)", switch=True),
    "cache_queue_port": ignored("the KV cache is in the engine process"),
    "rdma_comm_ports": ignored("KV is transferred through shared memory, or between machines over pd_comm_port"),
    "splitwise": ignored("a router uses prefill instances if it has any", switch=True),
    "scheduler_name": only_value("local", SCHEDULER),
    **named(
        "scheduler_host scheduler_port scheduler_db scheduler_password scheduler_topic scheduler_ttl "
        "scheduler_max_size scheduler_min_load_score scheduler_load_shards_num scheduler_expire_period "
        "scheduler_release_load_expire_period scheduler_sync_period scheduler_reader_parallel "
        "scheduler_writer_parallel scheduler_reader_batch_size scheduler_writer_batch_size",
        ignored(SCHEDULER),
    ),
}
"""Flags that do not change responses are ignored; flags that would change responses are rejected."""
