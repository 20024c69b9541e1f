"""Flags of vLLM (0.5 to 0.2x) without an equivalent: ignored or rejected, with a reason."""

from __future__ import annotations

from collections.abc import Mapping

from . import Alias, all_ignored, ignored, named, only_value, refused

COLLECTIVES = "ranks gather outputs in shared memory, and over TCP between machines"
LOGGED = "each request is logged in one line, without its text"
IN_METRICS = "statistics are in /metrics, not in the log"
NO_CODE = "loading code is not supported"
KERNELS = "--ops selects the kernels"
BATCHES = "--max-num-batched-tokens and --max-num-seqs control scheduling"
MAPPED = "weights are memory-mapped, not copied"
IMAGES = "images are preprocessed on the CPU according to the model's configuration"
ONE_MACHINE = "all engines of --data-parallel-size run on this machine, with one address"
NOT_OFFLOADED = "offloading weights is not supported"
NO_STATE_SPACE = "state-space layers are not supported"
TLS_CLIENTS = "client certificates are not verified: use --api-key, or a proxy that verifies them"
ADAPTER_SIZES = "each adapter is computed with its rank"

SECURITY: Mapping[str, Alias] = {
    "ssl_ca_certs": refused(TLS_CLIENTS),
    "ssl_cert_reqs": only_value("0", TLS_CLIENTS),
    "ssl_ciphers": refused("configure ciphers in OpenSSL's configuration (OPENSSL_CONF)"),
    "enable_ssl_refresh": refused("certificates are read at the start: restart the server to change them", switch=True),
    "uds": refused("Unix sockets are not supported: set --host 127.0.0.1 to serve this machine only"),
    "allow_credentials": refused("CORS with credentials is not supported: clients send API keys", switch=True),
    "allowed_methods": refused("CORS is limited by --allowed-origins only", unless=("*", '["*"]')),
    "allowed_headers": refused("CORS is limited by --allowed-origins only", unless=("*", '["*"]')),
    "disable_fastapi_docs": refused("/openapi.json, which lists the public routes, is always served", switch=True),
    "h11_max_incomplete_event_size": Alias("max_header_size"),
    "h11_max_header_count": ignored("--max-header-size limits the total size of headers"),
    "middleware": refused(NO_CODE),
    "trust_remote_code": ignored("code of a checkpoint is never executed", switch=True),
    "disable_access_log_for_endpoints": ignored(LOGGED),
    "enable_tokenizer_info_endpoint": ignored("/tokenizer_info is always served, with an API key if one is set", True),
    "enable_server_load_tracking": ignored("/load is always served, with an API key if one is set", switch=True),
    "enable_offline_docs": ignored("there is no documentation page", switch=True),
    "tool_server": refused("tools are called by clients, not by the server"),
    "kv_events_config": refused("KV cache events are not published"),
    "enable_prompt_embeds": refused("prompts must be text or token ids, not embeddings", switch=True),
    "enable_mm_embeds": refused("images cannot be given as embeddings", switch=True),
    "worker_cls": refused(NO_CODE, unless=("auto",)),
    **named(
        "tool_parser_plugin reasoning_parser_plugin io_processor_plugin scheduler_cls worker_extension_cls",
        refused(NO_CODE),
    ),
    "model_class_overrides": refused(NO_CODE, unless=("{}",)),
    "logits_processors": refused(NO_CODE, several=True),
}
"""Security-related flags without an equivalent."""

REFUSED: Mapping[str, Alias] = {
    "rope_scaling": refused("write rope_scaling into the checkpoint's config.json", unless=("", "none", "{}", "null")),
    "rope_theta": refused("write rope_theta into the checkpoint's config.json", unless=("none",)),
    "hf_config_path": refused("config.json must be in the checkpoint", unless=("none",)),
    "return_tokens_as_token_ids": refused("set return_tokens_as_token_ids in requests", switch=True),
    "default_chat_template_kwargs": refused("set chat_template_kwargs in requests", unless=("{}", "null")),
    "enable_force_include_usage": refused("set stream_options.include_usage in requests", switch=True),
    "enable_per_request_metrics": refused("use traces for metrics of single requests (--otlp-endpoint)", switch=True),
    "tokens_only": refused("requests and responses without text are not supported", switch=True),
    "grpc": refused("vLLM's gRPC is not served; --grpc-port serves KServe's", switch=True),
    "enable_elastic_ep": refused("the number of ranks is fixed at the start", switch=True),
    "enable_return_routed_experts": refused("use --expert-load and /expert_load for expert loads", switch=True),
    "mm_encoder_only": refused("a server always runs the whole model", switch=True),
    "video_pruning_rate": only_value("0", "all sampled frames of a video are kept"),
    "enable_prompt_adapter": refused("prompt adapters are not supported; --enable-lora has LoRA adapters", switch=True),
    "prompt_adapters": refused("prompt adapters are not supported", several=True),
    "enable_lora_bias": refused("LoRA adapters with biases are not supported", switch=True),
    "enable_tower_connector_lora": refused("LoRA adapters are applied to the language model only", switch=True),
    "lora_target_modules": refused("an adapter is applied to all of its modules", several=True),
    "default_mm_loras": refused("requests select their adapter", unless=("{}", "null")),
    "long_lora_scaling_factors": refused("long LoRA is not supported", unless=("none",)),
    "qlora_adapter_name_or_path": refused("use --lora-modules", unless=("none",)),
    "spec_decoding_acceptance_method": only_value(
        "rejection_sampler", "draft tokens are accepted if they equal the sampled tokens, so that results are the same"
    ),
    "model_loader_extra_config": refused("weights are read from safetensors files", unless=("{}", "null", "none")),
    "quantization_config": refused("use --quantization", unless=("{}", "null")),
    "image_processor": refused(IMAGES, unless=("none",)),
    "disable_image_processor": refused(IMAGES, switch=True),
    "override_attention_dtype": refused("attention is computed in --dtype", unless=("none",)),
    "kv_cache_dtype_skip_layers": refused("all layers have the same --kv-cache-dtype", several=True),
    "reasoning_config": refused("use --reasoning-parser", unless=("{}", "null")),
    "diffusion_config": refused("diffusion models are not supported", short="-dc", unless=("{}", "null")),
    "ec_transfer_config": refused("images are encoded by the instance that computes the prompt", unless=("{}", "null")),
    "weight_transfer_config": refused(
        "weights are updated from a folder: POST /v1/weights/reload", unless=("{}", "null")
    ),
    "additional_config": refused("vLLM's platform plugins are not supported", unless=("{}", "null")),
    "exclude_tools_when_tool_choice_none": ignored("with tool_choice none, no tool is called", switch=True),
    "device_ids": refused("set CUDA_VISIBLE_DEVICES or --device cuda:N", several=True),
    "offload_backend": only_value("auto", NOT_OFFLOADED),
    **named("offload_group_size offload_prefetch_step", only_value("0", NOT_OFFLOADED)),
    **named("cpu_offload_params offload_params", refused(NOT_OFFLOADED, several=True)),
    "prefill_context_parallel_size": only_value("1", COLLECTIVES, short="-pcp"),
    "data_parallel_backend": only_value("mp", ONE_MACHINE, short="-dpb"),
    "data_parallel_rank": refused(ONE_MACHINE, short="-dpn"),
    "data_parallel_start_rank": only_value("0", ONE_MACHINE, short="-dpr"),
    "data_parallel_size_local": refused(ONE_MACHINE, short="-dpl"),
    "data_parallel_address": refused(ONE_MACHINE, short="-dpa", unless=("127.0.0.1", "localhost")),
    "data_parallel_hybrid_lb": refused(ONE_MACHINE, switch=True, short="-dph"),
    "data_parallel_external_lb": refused(ONE_MACHINE, switch=True, short="-dpe"),
    "data_parallel_multi_port_external_lb": refused(ONE_MACHINE, switch=True, short="-dpm"),
}
"""Flags that would change responses; they are rejected."""

IGNORED: Mapping[str, Alias] = {
    "code_revision": ignored("code of a checkpoint is never executed"),
    "skip_tokenizer_init": ignored("prompts can always be token ids", switch=True),
    "ignore_patterns": ignored("only needed files are downloaded", several=True),
    "disable_sliding_window": ignored("use --max-model-len to limit the context to the sliding window", True),
    **all_ignored(
        BATCHES,
        "scheduler_delay_factor num_scheduler_steps num_lookahead_slots max_num_scheduled_tokens watermark "
        "prefill_schedule_interval optimization_level performance_mode ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold",
        switches="disable_async_output_proc multi_step_stream_outputs scheduler_reserve_full_isl "
        "disable_chunked_mm_input enable_dbo kv_sharing_fast_prefill",
    ),
    **named(
        "speculative_max_model_len speculative_disable_by_batch_size",
        ignored("drafting adapts to the load and to the draft model's context, without changing results"),
    ),
    "speculative_draft_tensor_parallel_size": ignored(
        "a draft model runs on the ranks of its model", short="-spec-draft-tp"
    ),
    "speculative_model_quantization": ignored("detected from the draft model's config.json"),
    **all_ignored(
        KERNELS,
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_tp_mode mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin attention_backend moe_backend "
        "linear_backend mamba_backend gdn_prefill_backend kda_prefill_backend ir_op_priority kernel_config",
        switches="speculative_disable_mqa_scorer disable_cascade_attn enable_flashinfer_autotune "
        "enable_bf16x3_router_gemm use_fp64_gumbel enable_flash_late_interaction",
    ),
    "disable_logprobs_during_spec_decoding": ignored("logprobs are always computed", switch=True),
    **named(
        "typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha",
        ignored("the typical acceptance sampler is not supported"),
    ),
    "disable_frontend_multiprocessing": ignored("API processes and engines are always separate", switch=True),
    **named(
        "tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers",
        ignored("texts are tokenized in threads"),
    ),
    **named(
        "ray_workers_use_nsight worker_use_ray engine_use_ray",
        ignored("use --distributed-executor-backend ray to run on a Ray cluster", switch=True),
    ),
    **all_ignored(
        IMAGES,
        "image_input_type image_token_id image_input_shape image_feature_size image_processor_revision "
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb video_pruning_method",
        switches="interleave_mm_strings skip_mm_profiling mm_device_do_normalize enable_mm_processor_stats "
        "disable_mm_preprocessor_cache",
    ),
    "mm_processor_cache_gb": ignored("image features are cached instead (--encoder-cache-size)"),
    "attention_config": ignored(KERNELS, short="-ac"),
    **named(
        "mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype mamba_ssu_algorithm "
        "mamba_cache_philox_rounds replayssm_buffer_len",
        ignored(NO_STATE_SPACE),
    ),
    **named("use_replayssm enable_mamba_cache_stochastic_rounding", ignored(NO_STATE_SPACE, switch=True)),
    "quantization_param_path": ignored("KV cache scales are computed dynamically"),
    "calculate_kv_scales": ignored("KV cache scales are computed dynamically", switch=True),
    "allow_deprecated_quantization": ignored("no format is deprecated", switch=True),
    **named(
        "max_parallel_loading_workers safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size pt_load_map_location",
        ignored(MAPPED),
    ),
    "use_tqdm_on_load": ignored("progress is shown in a terminal", switch=True),
    "offload_num_in_group": ignored(NOT_OFFLOADED),
    **named("lora_extra_vocab_size max_prompt_adapters max_prompt_adapter_token", ignored(ADAPTER_SIZES)),
    **named(
        "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
        ignored(ADAPTER_SIZES, switch=True),
    ),
    "max_cpu_loras": ignored("loaded adapters are not evicted"),
    "override_neuron_config": ignored("AWS Neuron is not supported"),
    "numa_bind": ignored("use --cpu-binding to bind ranks to cores", switch=True),
    **named("numa_bind_nodes numa_bind_cpus", ignored("use --cpu-binding to bind ranks to cores", several=True)),
    **named(
        "distributed_timeout_seconds cpu_distributed_timeout_seconds",
        ignored("use --node-timeout to limit how long nodes wait"),
    ),
    "data_parallel_rpc_port": ignored(ONE_MACHINE, short="-dpp"),
    **named(
        "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold",
        ignored(ONE_MACHINE),
    ),
    **all_ignored(
        COLLECTIVES,
        "all2all_backend dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
        switches="disable_custom_all_reduce fully_sharded_loras disable_nccl_for_dp_synchronization "
        "enable_ep_weight_filter",
    ),
    **all_ignored("engines are always restarted", "fault_tolerance_config", switches="enable_fault_tolerance"),
    "prefix_caching_hash_algo": ignored("prefix hashes have 128 bits or more"),
    "prefix_match_unit": ignored("prefixes are matched in units of --block-size"),
    **named(
        "disable_hybrid_kv_cache_manager use_v2_block_manager enable_cumem_allocator",
        ignored("there is one KV cache manager", switch=True),
    ),
    "collect_detailed_traces": ignored("traces always have spans of queue, prefill, KV transfer, decode", several=True),
    "profiler_config": ignored("use penstock bench or traces (--otlp-endpoint)"),
    "show_hidden_metrics_for_version": ignored("no metric is hidden"),
    **named("kv_cache_metrics_sample jit_monitor_mode", ignored(IN_METRICS)),
    **named(
        "disable_log_stats aggregate_engine_logging kv_cache_metrics cudagraph_metrics "
        "enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_verbose",
        ignored(IN_METRICS, switch=True),
    ),
    **named(
        "disable_log_requests enable_log_requests disable_uvicorn_access_log enable_log_outputs enable_log_deltas",
        ignored(LOGGED, switch=True),
    ),
    "max_log_len": ignored("prompts are never logged"),
    "log_config_file": ignored("use --log-level, --log-format and --log-file"),
    "log_error_stack": ignored("tracebacks of unexpected errors are always logged", switch=True),
    **named("fingerprint_mode fingerprint_value", ignored("system_fingerprint identifies the kernels")),
    **all_ignored("Cohere's API is not served", "cohere_format", switches="cohere_is_reasoning_model"),
    "fail_on_environ_validation": ignored("unknown variables are logged", switch=True),
}
"""Flags without effect."""
