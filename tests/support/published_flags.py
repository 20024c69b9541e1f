"""Command line options and environment variables of other systems.

Sources: vLLM 0.5.0, 0.6.3 and main of August 2026; FastDeploy of April 2026; Triton Inference Server of August 2026
with TensorRT-LLM's ``launch_triton_server.py``; the usage text in BladeLLM's documentation.
"""

VLLM_SWITCHES = """
--aggregate-engine-logging --allow-credentials --allow-deprecated-quantization --async-scheduling
--calculate-kv-scales --cohere-is-reasoning-model --cudagraph-metrics --data-parallel-external-lb
--data-parallel-hybrid-lb --data-parallel-multi-port-external-lb --disable-async-output-proc --disable-cascade-attn
--disable-chunked-mm-input --disable-custom-all-reduce --disable-fastapi-docs --disable-frontend-multiprocessing
--disable-hybrid-kv-cache-manager --disable-image-processor --disable-log-requests --disable-log-stats
--disable-logprobs-during-spec-decoding --disable-mm-preprocessor-cache --disable-nccl-for-dp-synchronization
--disable-sliding-window --disable-uvicorn-access-log --enable-auto-tool-choice --enable-bf16x3-router-gemm
--enable-chunked-prefill --enable-cumem-allocator --enable-dbo --enable-elastic-ep --enable-ep-weight-filter
--enable-eplb --enable-expert-parallel --enable-fault-tolerance --enable-flash-late-interaction
--enable-flashinfer-autotune --enable-force-include-usage --enable-layerwise-nvtx-tracing --enable-log-deltas
--enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-lora
--enable-mamba-cache-stochastic-rounding --enable-mfu-metrics --enable-mixed-moe-lora-format --enable-mm-embeds
--enable-moe-shared-loras --enable-offline-docs --enable-per-request-metrics --enable-prefix-caching
--enable-prompt-adapter --enable-prompt-embeds --enable-prompt-tokens-details --enable-request-id-headers
--enable-return-routed-experts --enable-server-load-tracking --enable-sleep-mode --enable-ssl-refresh
--enable-tokenizer-info-endpoint --enable-tower-connector-lora --enforce-eager --engine-use-ray
--exclude-tools-when-tool-choice-none --fail-on-environ-validation --fully-sharded-loras --grpc --headless
--interleave-mm-strings --jit-monitor-verbose --kv-cache-metrics --kv-sharing-fast-prefill --language-model-only
--log-error-stack --mm-device-do-normalize --mm-encoder-only --multi-step-stream-outputs --numa-bind
--ray-workers-use-nsight --return-tokens-as-token-ids --scheduler-reserve-full-isl --skip-mm-profiling
--skip-tokenizer-init --specialize-active-lora --speculative-disable-mqa-scorer --tokens-only --trust-remote-code
--trust-request-chat-template --use-fp64-gumbel --use-replayssm --use-tqdm-on-load --use-v2-block-manager
--worker-use-ray
""".split()
VLLM_VALUES = """
--additional-config --all2all-backend --allowed-headers --allowed-local-media-path --allowed-media-domains
--allowed-methods --allowed-origins --api-key --api-server-count --attention-backend --attention-config --block-size
--chat-template --chat-template-content-format --code-revision --cohere-format --collect-detailed-traces
--compilation-config --config --config-format --convert --cp-kv-cache-interleave-size
--cpu-distributed-timeout-seconds --cpu-offload-gb --cpu-offload-params --cudagraph-capture-sizes
--data-parallel-address --data-parallel-backend --data-parallel-rank --data-parallel-rpc-port --data-parallel-size
--data-parallel-size-local --data-parallel-start-rank --data-parallel-supervisor-port --dbo-decode-token-threshold
--dbo-prefill-token-threshold --dcp-comm-backend --dcp-kv-cache-interleave-size --decode-context-parallel-size
--default-chat-template-kwargs --default-mm-loras --device --device-ids --diffusion-config
--disable-access-log-for-endpoints --distributed-executor-backend --distributed-timeout-seconds --download-dir
--dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dtype
--ec-transfer-config --eplb-config --expert-placement-strategy --fault-tolerance-config --fingerprint-mode
--fingerprint-value --gdn-prefill-backend --generation-config --gpu-memory-utilization --guided-decoding-backend
--h11-max-header-count --h11-max-incomplete-event-size --hf-config-path --hf-overrides --hf-token --host
--ignore-patterns --image-feature-size --image-input-shape --image-input-type --image-processor
--image-processor-revision --image-token-id --io-processor-plugin --ir-op-priority --jit-monitor-mode
--kda-prefill-backend --kernel-config --kv-cache-dtype --kv-cache-dtype-skip-layers --kv-cache-memory-bytes
--kv-cache-metrics-sample --kv-events-config --kv-offloading-backend --kv-offloading-size --kv-transfer-config
--limit-mm-per-prompt --linear-backend --load-format --log-config-file --log-level --logits-processors
--logprobs-mode --long-lora-scaling-factors --long-prefill-token-threshold --lora-dtype --lora-extra-vocab-size
--lora-modules --lora-target-modules --mamba-backend --mamba-block-size --mamba-cache-dtype --mamba-cache-mode
--mamba-cache-philox-rounds --mamba-ssm-cache-dtype --mamba-ssu-algorithm --master-addr --master-port
--max-context-len-to-capture --max-cpu-loras --max-cudagraph-capture-size --max-log-len --max-logprobs
--max-lora-rank --max-loras --max-model-len --max-num-batched-tokens --max-num-scheduled-tokens --max-num-seqs
--max-parallel-loading-workers --max-prompt-adapter-token --max-prompt-adapters --max-seq-len-to-capture
--media-io-kwargs --middleware --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
--mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-encoder-tp-mode --mm-hasher-algorithm
--mm-ipc-gpu-memory-gb --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-device --mm-processor-kwargs
--mm-shm-cache-max-object-size-mb --mm-tensor-ipc --model --model-class-overrides --model-impl
--model-loader-extra-config --moe-backend --ngram-prompt-lookup-max --ngram-prompt-lookup-min --nnodes --node-rank
--num-gpu-blocks-override --num-lookahead-slots --num-scheduler-steps --num-speculative-tokens --numa-bind-cpus
--numa-bind-nodes --offload-backend --offload-group-size --offload-num-in-group --offload-params
--offload-prefetch-step --optimization-level --otlp-traces-endpoint --override-attention-dtype
--override-generation-config --override-neuron-config --override-pooler-config --performance-mode
--pipeline-parallel-size --pooler-config --port --preemption-mode --preemption_mode --prefill-context-parallel-size
--prefill-schedule-interval --prefix-caching-hash-algo --prefix-match-unit --profiler-config --prompt-adapters
--pt-load-map-location --qlora-adapter-name-or-path --quantization --quantization-config --quantization-param-path
--reasoning-config --reasoning-parser --reasoning-parser-plugin --renderer-num-workers --replayssm-buffer-len
--response-role --revision --root-path --rope-scaling --rope-theta --runner --safetensors-load-strategy
--safetensors-prefetch-block-size --safetensors-prefetch-num-threads --scheduler-cls --scheduler-delay-factor
--scheduling-policy --seed --served-model-name --show-hidden-metrics-for-version --shutdown-timeout
--spec-decoding-acceptance-method --spec-method --spec-model --spec-tokens --speculative-config
--speculative-disable-by-batch-size --speculative-draft-tensor-parallel-size --speculative-max-model-len
--speculative-model --speculative-model-quantization --ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-ciphers
--ssl-keyfile --stream-interval --structured-outputs-config --swap-space --task --tensor-parallel-size --tokenizer
--tokenizer-mode --tokenizer-pool-extra-config --tokenizer-pool-size --tokenizer-pool-type --tokenizer-revision
--tool-call-parser --tool-parser-plugin --tool-server --typical-acceptance-sampler-posterior-alpha
--typical-acceptance-sampler-posterior-threshold --ubatch-size --uds --uvicorn-log-level --video-pruning-method
--video-pruning-rate --watermark --weight-transfer-config --worker-cls --worker-extension-cls
""".split()
VLLM_SHORT = """
-q -tp -pp -dp -dcp -pcp -dpn -dpr -dpl -dpa -dpp -dpb -ep -dph -dpe -dpm -sc -dc -cc -ac -asc -n -r -O -spec-draft-tp
""".split()
VLLM_VARIABLES = """
S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
VLLM_ALLOW_DEPRECATED_BLOCK_MANAGER_V1 VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN
VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_API_KEY
VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_ATTENTION_BACKEND VLLM_AUDIO_FETCH_TIMEOUT VLLM_BATCH_INVARIANT
VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_BUILD_WITH_NEURON
VLLM_CACHE_ROOT VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT
VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU
VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUSTOM_SCOPES_FOR_PROFILING
VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE
VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_BUFFER_SIZE_MB
VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE
VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEP_GEMM_WARMUP VLLM_DISABLED_KERNELS
VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_PYNCCL VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DOCKER_BUILD_CONTEXT VLLM_DO_NOT_TRACK
VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST
VLLM_EC_SIDE_CHANNEL_PORT VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_COHERE_API
VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_PREGRAD_PASSES
VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_STARTUP_PLAN VLLM_ENABLE_V1_MULTIPROCESSING
VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FLASHINFER_ALLREDUCE_BACKEND
VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
VLLM_FLOAT32_MATMUL_PRECISION VLLM_FORCE_AOT_LOAD VLLM_FUSED_MOE_CHUNK_SIZE VLLM_GC_DEBUG
VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPU_NIC_PCIE_MAPPING
VLLM_GPU_SYNC_CHECK VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP VLLM_HTTP_TIMEOUT_KEEP_ALIVE
VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG
VLLM_HUMMING_USE_F16_ACCUM VLLM_IMAGE_FETCH_TIMEOUT VLLM_IMAGE_TAG VLLM_INSTALL_PUNICA_KERNELS VLLM_INSTANCE_ID
VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_KV_CACHE_LAYOUT
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL
VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM
VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAIN_CUDA_VERSION VLLM_MARLIN_INPUT_DTYPE
VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S
VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_IMAGE_PIXELS VLLM_MAX_N_SEQUENCES
VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
VLLM_MEDIA_CONNECTOR VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MLA_DISABLE VLLM_MM_HASHER_ALGORITHM VLLM_MODEL_REDIRECT_PATH
VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM
VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB
VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD
VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS VLLM_NIXL_EP_MAX_NUM_RANKS
VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NO_DEPRECATION_WARNING VLLM_NO_USAGE_STATS
VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_OPENVINO_CPU_KV_CACHE_PRECISION
VLLM_OPENVINO_DEVICE VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS VLLM_OPENVINO_KVCACHE_SPACE VLLM_P2P_SIDE_CHANNEL_HOST
VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PATTERN_MATCH_DEBUG VLLM_PLUGINS VLLM_PORT VLLM_PP_LAYER_PARTITION
VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS
VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS
VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS
VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_ROCM_AITER_MLA_ASM_PADDING
VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING
VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR
VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE
VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM
VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM VLLM_RPC_BASE_PATH
VLLM_RPC_TIMEOUT VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_P2P_CHECK VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_SSM_CONV_STATE_LAYOUT VLLM_SYSTEM_START_DATE VLLM_TARGET_DEVICE
VLLM_TEST_DYNAMO_FULLGRAPH_CAPTURE VLLM_TEST_FORCE_FP8_MARLIN VLLM_TEST_FORCE_LOAD_FORMAT
VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TORCH_COMPILE_LEVEL
VLLM_TORCH_PROFILER_DIR VLLM_TPU_USING_PATHWAYS VLLM_TRACE_FUNCTION VLLM_TRITON_ATTN_USE_TD
VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD VLLM_TUNED_CONFIG_FOLDER VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER
VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS
VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_LAYERNAME
VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_MODELSCOPE VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_PRECOMPILED
VLLM_USE_PRECOMPILED_RUST VLLM_USE_RAY_COMPILED_DAG VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_SPMD_WORKER
VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND
VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ
VLLM_USE_TRITON_FLASH_ATTN VLLM_USE_V2_MODEL_RUNNER VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE
VLLM_VIDEO_FETCH_TIMEOUT VLLM_VIDEO_LOADER_BACKEND VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION
VLLM_XLA_USE_SPMD VLLM_XPU_ENABLE_XPU_GRAPH VLLM_XPU_USE_SAMPLER_KERNEL VLLM_ZENTORCH_WEIGHT_PREPACK
""".split()
FASTDEPLOY_SWITCHES = """
--disable-chunked-mm-input --disable-custom-all-reduce --disable-sequence-parallel-moe --dynamic-load-weight
--enable-chunked-moe --enable-chunked-prefill --enable-early-stop --enable-entropy --enable-eplb
--enable-expert-parallel --enable-logprob --enable-mm --enable-mm-output --enable-prefix-caching
--ep-prefill-use-worst-num-tokens --guided-decoding-disable-any-whitespace --lm_head-fp32 --moe-gate-fp32
--splitwise --use-internode-ll-two-stage
""".split()
FASTDEPLOY_VALUES = """
--api-key --block-size --cache-queue-port --cache-transfer-protocol --chat-template --chunked-moe-size
--controller-port --convert --data-parallel-size --deploy-modality --early-stop-config --enable-output-caching
--enable-overlap-schedule --engine-worker-queue-port --eplb-config --gpu-memory-utilization
--graph-optimization-config --guided-decoding-backend --host --ips --kv-cache-ratio --kvcache-storage-backend
--limit-mm-per-prompt --load-choices --load-strategy --local-data-parallel-id --logits-processors --logprobs-mode
--long-prefill-token-threshold --max-concurrency --max-encoder-cache --max-logprobs --max-long-partial-prefills
--max-model-len --max-num-batched-tokens --max-num-partial-prefills --max-num-seqs --max-processor-cache
--max-waiting-time --metrics-port --mm-processor-kwargs --model --model-config-name --model-impl
--model-loader-extra-config --num-gpu-blocks-override --override-pooler-config --pd-comm-port
--plas-attention-config --port --prealloc-dec-block-slot-num-threshold --quantization --rdma-comm-ports
--reasoning-parser --request-timeout-secs --revision --router --routing-replay-config --rsync-config --runner
--scheduler-db --scheduler-expire-period --scheduler-host --scheduler-load-shards-num --scheduler-max-size
--scheduler-min-load-score --scheduler-name --scheduler-password --scheduler-port --scheduler-reader-batch-size
--scheduler-reader-parallel --scheduler-release-load-expire-period --scheduler-sync-period --scheduler-topic
--scheduler-ttl --scheduler-writer-batch-size --scheduler-writer-parallel --seed --served-model-name
--shutdown-comm-group-if-worker-idle --speculative-config --splitwise-role --static-decode-blocks --swap-space
--task --tensor-parallel-size --timeout --timeout-graceful-shutdown --tokenizer --tokenizer-base-url
--tool-call-parser --tool-parser-plugin --use-warmup --workers --write-policy
""".split()
FASTDEPLOY_SHORT = ["-tp"]
FASTDEPLOY_VARIABLES = """
DO_NOT_TRACK ENABLE_V1_KVCACHE_SCHEDULER ENCODE_FEATURE_BOS_AK ENCODE_FEATURE_BOS_SK ENCODE_FEATURE_ENDPOINT
EXPORTER_OTLP_ENDPOINT EXPORTER_OTLP_HEADERS FD_API_KEY FD_ATTENTION_BACKEND FD_BUILDING_ARCS FD_CACHE_PARAMS
FD_CACHE_PROC_ERROR_COUNT FD_CACHE_PROC_EXIT_TIMEOUT FD_CONFIG_ROOT FD_CONSOLE_DECODE_LOG_INTERVAL
FD_CONSOLE_SCHEDULER_METRICS FD_CPU_USE_BF16 FD_CUSTOM_AR_MAX_SIZE_MB FD_DEBUG FD_DETERMINISTIC_LOG_MODE
FD_DETERMINISTIC_MODE FD_DETERMINISTIC_SPLIT_KV_SIZE FD_DISABLED_RECOVER FD_DISABLE_CHUNKED_PREFILL
FD_ENABLE_ASYNC_LLM FD_ENABLE_CACHE_TASK FD_ENABLE_E2W_TENSOR_CONVERT FD_ENABLE_INTERNAL_ADAPTER
FD_ENABLE_MAX_PREFILL FD_ENABLE_MODEL_CACHE FD_ENABLE_MODEL_LOAD_CACHE FD_ENABLE_MULTI_API_SERVER FD_ENABLE_PDL
FD_ENABLE_PD_RDMA_EAGER_CONNECT FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE FD_ENABLE_RETURN_TEXT FD_ENABLE_RL
FD_ENABLE_SWAP_SPACE_CLEARING FD_ENABLE_V1_UPDATE_WEIGHTS FD_ENC_DEC_BLOCK_NUM FD_ENGINE_TASK_QUEUE_WITH_SHM
FD_EP_MAX_PREFETCH_TASK_NUM FD_FILL_BITMASK_BATCH FD_FOR_TORCH_MODEL_FORMAT FD_FP8_QUANT_WITH_POW2SCALE
FD_GUIDANCE_DISABLE_ADDITIONAL FD_HOST_NAME FD_HPU_CHUNK_SIZE FD_HPU_MEASUREMENT_MODE FD_JOB_ID
FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR FD_LLGUIDANCE_LOG_LEVEL FD_LOG_BACKUP_COUNT FD_LOG_DIR FD_LOG_LEVEL
FD_LOG_MAX_LEN FD_LOG_REQUESTS FD_LOG_REQUESTS_LEVEL FD_MAX_STOP_SEQS_NUM FD_MODEL_CACHE FD_MODEL_SOURCE
FD_MOE_BACKEND FD_MOE_MXFP4_BACKEND FD_MOE_PROB_IN_ADVANCE FD_NVFP4_GEMM_BACKEND FD_NVFP4_LOAD_BLOCKSCALE_LEAVE
FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS FD_PD_CHANGEABLE FD_PD_REORDER
FD_PLUGINS FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS
FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL
FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL
FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL FD_SAMPLING_CLASS
FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST FD_SERVICE_NAME FD_STOP_SEQS_MAX_LEN FD_SUPPORT_MAX_CONNECTIONS
FD_SiluAndMul_USE_PHI_SWIGLU FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT FD_TP_GROUP_GID_OFFSET FD_TRACE
FD_TRITON_KERNEL_CACHE_DIR FD_USAGE_SOURCE FD_USAGE_STATS_SERVER FD_USE_AGGREGATE_SEND FD_USE_BLACKWELL_GEMM
FD_USE_DEEP_GEMM FD_USE_GET_SAVE_OUTPUT_V1 FD_USE_HF_TOKENIZER FD_USE_MACHETE FD_USE_PFCC_DEEP_EP
FD_USE_PHI_FP8_QUANT FD_USE_PHI_MOE_PERMUTE FD_USE_PHI_MOE_TOPK FD_USE_PHI_RMSNORM FD_WORKER_ALIVE_TIMEOUT
FD_XPU_ENABLE_MIXED_EP_MODE FD_XPU_MOE_FFN_QUANT_TYPE_MAP FD_ZMQ_CONTROL_CMD_SERVER_PORTS
FD_ZMQ_RECV_REQUEST_SERVER_PORT FD_ZMQ_RECV_REQUEST_SERVER_PORTS FD_ZMQ_SEND_RESPONSE_SERVER_PORT
FD_ZMQ_SEND_RESPONSE_SERVER_PORTS FD_ZMQ_SNDHWM FILE_BACKEND_STORAGE_DIR FMQ_CONFIG_JSON
PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES TRACES_ENABLE TRACES_EXPORTER ZMQ_SEND_BATCH_DATA
""".split()
TRITON_SWITCHES = """
--disable-auto-complete-config
--force --log --multi-model --oversubscribe --no-mpi
""".split()
TRITON_VALUES = """
--allow-client-shm --allow-cpu-metrics --allow-gpu-metrics --allow-grpc --allow-http --allow-metrics
--allow-sagemaker --allow-vertex-ai --backend-config --backend-directory --buffer-manager-thread-count
--cache-config --cache-directory --cuda-memory-pool-byte-size --cuda-virtual-address-size --enable-peer-access
--exit-on-error --exit-timeout-secs --grpc-address --grpc-header-forward-pattern --grpc-http2-max-ping-strikes
--grpc-http2-max-pings-without-data --grpc-http2-min-recv-ping-interval-without-data
--grpc-infer-allocation-pool-size --grpc-infer-response-compression-level --grpc-infer-thread-count
--grpc-keepalive-permit-without-calls --grpc-keepalive-time --grpc-keepalive-timeout --grpc-max-connection-age
--grpc-max-connection-age-grace --grpc-max-response-pool-size --grpc-port --grpc-restricted-protocol
--grpc-root-cert --grpc-server-cert --grpc-server-key --grpc-use-ssl --grpc-use-ssl-mutual --host-policy
--http-address --http-header-forward-pattern --http-max-input-size --http-port --http-restricted-api
--http-thread-count --id --load-model --log-error --log-file --log-format --log-info --log-verbose --log-warning
--metrics-address --metrics-config --metrics-interval-ms --metrics-port --min-supported-compute-capability
--model-config-name --model-control-mode --model-load-gpu-limit --model-load-retry-count --model-load-thread-count
--model-namespacing --model-repository --model-store --pinned-memory-pool-byte-size --rate-limit
--rate-limit-resource --repoagent-directory --repository-poll-secs --response-cache-byte-size --reuse-grpc-port
--reuse-http-port --sagemaker-port --sagemaker-safe-port-range --sagemaker-thread-count --strict-model-config
--strict-readiness --trace-config --trace-count --trace-file --trace-level --trace-log-frequency --trace-rate
--vertex-ai-default-model --vertex-ai-port --vertex-ai-thread-count
--world_size --tritonserver --grpc_port --http_port --metrics_port --tensorrt_llm_model_name --exit_timeout
--multimodal_gpu0_cuda_mem_pool_bytes
""".split()
BLADELLM_SWITCHES = """
--disable_prompt_cache --prompt_cache_enable_swap --enable_custom_allreduce --enable_json_warmup --enable_llumnix
--enable_triton_mla --disable_cuda_graph --draft.enable_triton_mla --draft.disable_cuda_graph
""".split()
BLADELLM_VALUES = """
--tensor_parallel_size --pipeline_parallel_size --pipeline_micro_batch --attention_dp_size --host --port
--worker_socket_path --log_level --max_gpu_memory_utilization --preempt_strategy --ragged_flash_max_batch_tokens
--decode_algo --gamma --decoding_parallelism --metric_exporters --max_queue_time --llumnix_config --model
--tokenizer_dir --chat_template --dtype --kv_cache_quant --kv_cache_quant_sub_heads --tokenizer_special_tokens
--cuda_graph_max_batch_size --cuda_graph_batch_sizes --with_visual --use_sps --use_lookahead --look_ahead_window_size
--look_ahead_gram_size --guess_set_size --draft.model --draft.tokenizer_dir --draft.chat_template --draft.dtype
--draft.kv_cache_quant --draft.kv_cache_quant_sub_heads --draft.tokenizer_special_tokens
--draft.cuda_graph_max_batch_size --draft.cuda_graph_batch_sizes --draft.with_visual --draft.use_sps
--draft.use_lookahead --draft.look_ahead_window_size --draft.look_ahead_gram_size --draft.guess_set_size
""".split()
BLADELLM_SHORT = ["-tp", "-pp"]
VALUES = {
    "vllm": {
        "--quantization": (
            "aqlm auto_awq auto_gptq awq awq_marlin bitsandbytes compressed-tensors deepseek_v4_fp8 deepspeedfp "
            "experts_int8 fbgemm_fp8 fp8 fp8_per_block fp8_per_channel fp8_per_tensor fp_quant gguf gpt_oss_mxfp4 "
            "gptq gptq_marlin gptq_marlin_24 humming inc int8_per_channel_weight_only ipex marlin modelopt "
            "modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 mxfp8 neuron_quant nvfp4_per_token online "
            "qqq quark smoothquant torchao tpu_int8"
        ),
        "--load-format": (
            "auto pt safetensors npcache dummy tensorizer bitsandbytes sharded_state gguf mistral runai_streamer "
            "runai_streamer_sharded instanttensor modelexpress fastsafetensors"
        ),
        "--dtype": "auto half float16 bfloat16 float float32",
        "--kv-cache-dtype": "auto float16 bfloat16 fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4 int8_per_token_head",
        "--tokenizer-mode": "auto hf slow mistral deepseek_v32",
        "--config-format": "auto hf mistral",
        "--task": "auto generate embedding embed classify score reward draft",
        "--runner": "auto generate pooling draft",
        "--convert": "auto none embed classify",
        "--model-impl": "auto vllm transformers terratorch",
        "--distributed-executor-backend": "ray mp uni external_launcher",
        "--guided-decoding-backend": "outlines lm-format-enforcer xgrammar guidance auto xgrammar:no-fallback "
        "xgrammar:disable-any-whitespace",
        "--preemption-mode": "recompute swap",
        "--scheduling-policy": "fcfs priority",
        "--uvicorn-log-level": "debug info warning error critical trace",
        "--chat-template-content-format": "auto string openai",
        "--logprobs-mode": "raw_logprobs raw_logits processed_logprobs processed_logits",
        "--spec-decoding-acceptance-method": "rejection_sampler typical_acceptance_sampler",
        "--block-size": "8 16 32 64 128",
        "--device": "auto cuda cpu",
        "--lora-dtype": "auto float16 bfloat16",
        "--safetensors-load-strategy": "lazy eager prefetch torchao",
        "--kv-offloading-backend": "native lmcache",
        "--speculative-model": "[ngram] /a/path",
        "--spec-method": "ngram eagle eagle3 medusa mtp draft_model",
        "--prefix-caching-hash-algo": "sha256 sha256_cbor xxhash xxhash_cbor builtin",
        "--response-role": "assistant",
        "--generation-config": "auto vllm /a/path",
    },
    "fastdeploy": {
        "--quantization": "wint4 wint8 w8a8 block_wise_fp8 w4afp8 wfp8afp8",
        "--guided-decoding-backend": "auto xgrammar off guidance",
        "--splitwise-role": "mixed prefill decode",
        "--scheduler-name": "local global splitwise dp",
        "--load-choices": "default default_v1 dummy",
        "--model-impl": "auto fastdeploy paddleformers",
        "--reasoning-parser": "ernie-x1 ernie-45-vl ernie_x1 qwen3",
        "--tool-call-parser": "ernie-x1 ernie_x1 qwen3",
        "--kvcache-storage-backend": "mooncake attention_store file",
        "--deploy-modality": "mixed text",
        "--use-warmup": "0 1",
    },
    "bladellm": {
        "--dtype": "half float16 bfloat16 float float32",
        "--kv_cache_quant": (
            "no_quant int8 int4 int8_affine int4_affine fp8_e5m2 fp8_e4m3 mix_f852i4 mix_f843i4 mix_i8i4 mix_i4i4"
        ),
        "--preempt_strategy": "AUTO RECOMPUTE SWAP",
        "--decode_algo": "sps look_ahead normal",
        "--log_level": "DEBUG INFO WARNING ERROR",
        "--use_lookahead": "true false True False",
        "--use_sps": "true false",
    },
    "triton": {
        "--log-format": "default ISO8601",
        "--model-control-mode": "none explicit poll",
        "--rate-limit": "off execution_count",
        "--allow-http": "true false True False 1 0 on off",
        "--grpc-infer-response-compression-level": "none low medium high",
    },
}
"""Documented values of options, by system and option."""
