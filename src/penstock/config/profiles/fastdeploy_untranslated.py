"""Flags of FastDeploy (2.0 to 2.5) without a counterpart: ignored with a reason, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from . import Alias, ignored, named, only_value, refused

COLLECTIVES = "ranks gather outputs in shared memory, and over TCP between machines"
NO_CODE = "loading code is not supported"
SCHEDULER = "instances are found by a router, not through Redis: start one and give --router"
EXPERTS = "--enable-expert-parallel gives each rank whole experts"
PRECISION = "this part is computed in the type of the model"

FLAGS: Mapping[str, Alias] = {
    **named("tool_parser_plugin model_config_name", refused(NO_CODE)),
    "logits_processors": refused(NO_CODE, several=True),
    "tokenizer_base_url": refused("texts are encoded here: no tokenizer service is asked"),
    "rsync_config": refused("weights are changed from a folder: POST /v1/weights/reload", unless=("{}", "null")),
    "routing_replay_config": refused("/expert_load tells the load of experts (--expert-load)", unless=("{}", "null")),
    "model_loader_extra_config": refused("weights are read as safetensors", unless=("{}", "null", "none")),
    "plas_attention_config": refused("attention is exact", unless=("{}", "null")),
    "kvcache_storage_backend": refused("--kv-offloading-disk-path keeps prefixes on a disk"),
    "write_policy": only_value("write_through", "prefixes are written when their blocks are full"),
    "logprobs_mode": only_value("raw_logprobs", "logprobs are the model's own"),
    "early_stop_config": refused("sequences that repeat themselves go on", unless=("{}", "null")),
    "enable_early_stop": refused("sequences that repeat themselves go on", switch=True),
    "enable_mm_output": refused("answers are text", switch=True),
    "enable_eplb": refused("--expert-placement places experts at the start", switch=True),
    "eplb_config": refused("--expert-placement places experts at the start", unless=("{}", "null")),
    "local_data_parallel_id": only_value("0", "engines of --data-parallel-size are started together"),
    "enable_entropy": ignored("the entropy of answers is not in the log", switch=True),
    "enable_output_caching": ignored("answers are cached as prefixes are (--enable-prefix-caching)"),
    "enable_overlap_schedule": ignored("--max-concurrent-batches plans steps ahead"),
    "enable_custom_all_reduce": ignored(COLLECTIVES, switch=True),
    "disable_custom_all_reduce": ignored(COLLECTIVES, switch=True),
    "enable_chunked_moe": ignored(EXPERTS, switch=True),
    "chunked_moe_size": ignored(EXPERTS),
    **named(
        "disable_sequence_parallel_moe ep_prefill_use_worst_num_tokens use_internode_ll_two_stage",
        ignored(EXPERTS, switch=True),
    ),
    **named("lm_head_fp32 moe_gate_fp32", ignored(PRECISION, switch=True)),
    "disable_chunked_mm_input": ignored("an image is encoded once, whatever the chunks", switch=True),
    "deploy_modality": ignored("a model that sees images takes texts, too"),
    "load_strategy": ignored("weights are changed from a folder: POST /v1/weights/reload"),
    "runner": ignored("every model serves all that its checkpoint is for: completions, chats, embeddings, classes"),
    "max_encoder_cache": ignored("--encoder-cache-size is the size of the cache of image features"),
    "max_processor_cache": ignored("images are preprocessed again, and their features are cached"),
    "prealloc_dec_block_slot_num_threshold": ignored("--static-decode-blocks reserves blocks"),
    "shutdown_comm_group_if_worker_idle": ignored(COLLECTIVES),
    "controller_port": ignored("--port has all routes"),
    "enable_mm": ignored("FastDeploy has deprecated it, and a model's config.json says it", switch=True),
    "cache_queue_port": ignored("the KV cache is in the engine process"),
    "rdma_comm_ports": ignored("KV goes through shared memory on one machine, and over pd_comm_port between them"),
    "splitwise": ignored("a router uses prefill instances where there are any", switch=True),
    "scheduler_name": only_value("local", SCHEDULER),
    **named(
        "scheduler_host scheduler_port scheduler_db scheduler_password scheduler_topic scheduler_ttl "
        "scheduler_max_size scheduler_min_load_score scheduler_load_shards_num scheduler_expire_period "
        "scheduler_release_load_expire_period scheduler_sync_period scheduler_reader_parallel "
        "scheduler_writer_parallel scheduler_reader_batch_size scheduler_writer_batch_size",
        ignored(SCHEDULER),
    ),
}
"""Ignored where the answers stay the same; refused otherwise."""
