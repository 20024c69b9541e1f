"""Templates of a Triton model repository, as in TensorRT-LLM's backend before ``fill_template.py`` runs.

The names come from NVIDIA's documentation and its example commands.
"""

from __future__ import annotations

from pathlib import Path

TEMPLATES = {
    "preprocessing": 'name: "preprocessing" backend: "python" max_batch_size: ${triton_max_batch_size}',
    "postprocessing": 'name: "postprocessing" backend: "python" max_batch_size: ${triton_max_batch_size}',
    "ensemble": 'name: "ensemble" platform: "ensemble" max_batch_size: ${triton_max_batch_size}',
    "tensorrt_llm_bls": """name: "tensorrt_llm_bls" backend: "python" max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }""",
    "tensorrt_llm": """name: "tensorrt_llm" backend: "${triton_backend}" max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
dynamic_batching { max_queue_delay_microseconds: ${max_queue_delay_microseconds} }
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true } ]""",
}
KEYS = {
    "preprocessing": ["tokenizer_dir"],
    "postprocessing": ["tokenizer_dir"],
    "ensemble": [],
    "tensorrt_llm_bls": ["accumulate_tokens"],
    "tensorrt_llm": [
        *("max_beam_width", "gpt_model_type=batching_strategy", "gpt_model_path=engine_dir", "batch_scheduler_policy"),
        *("kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache", "enable_chunked_context"),
        *("exclude_input_in_output", "enable_kv_cache_reuse", "decoding_mode", "gpu_device_ids", "medusa_choices"),
        *("normalize_log_probs", "max_attention_window_size", "sink_token_length", "kv_cache_host_memory_bytes"),
    ],
}
"""Parameters by model; ``parameter=variable`` if the template's variable has a different name."""
INSTANCE_GROUP = "instance_group [ { count: ${%s_instance_count} kind: KIND_CPU } ]"


def write_templates(folder: Path) -> Path:
    """Write the model repository to a new folder."""
    for model, text in TEMPLATES.items():
        lines = [text]
        if model in ("preprocessing", "postprocessing"):
            lines.append(INSTANCE_GROUP % model)
        if model == "tensorrt_llm_bls":
            lines.append(INSTANCE_GROUP % "bls")
        for key in KEYS[model]:
            name, _, value = key.partition("=")
            lines.append(f'parameters: {{ key: "{name}" value: {{ string_value: "${{{value or name}}}" }} }}')
        (folder / model).mkdir(parents=True)
        (folder / model / "config.pbtxt").write_text("\n".join(lines))
    return folder
