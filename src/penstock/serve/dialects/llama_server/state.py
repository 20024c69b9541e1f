"""``/props`` and ``/slots``: properties of the model and the server in llama-server's format."""

from __future__ import annotations

from typing import Any

from penstock.serve.models.served_models import ServedModel
from penstock.text.side_files import TOOL_USE
from penstock.version import __version__

RANDOM_SEED = 2**32 - 1
"""Seed that llama-server reports if the seed is random."""


def settings_of(sampling: Any) -> dict[str, Any]:
    """Sampling parameters under llama-server's names."""
    return {
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": [*sampling.stop],
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs or 0,
    }


def props(service: ServedModel) -> dict[str, Any]:
    processor = service.gateway.input_processor
    tokenizer = processor.tokenizer
    sampling = processor.default_sampling
    return {
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": service.gateway.engine_pool.known_engine().max_model_len,
            "speculative": False,
            "is_processing": False,
            "params": settings_of(sampling) | {"n_predict": -1, "stream": True},
        },
        "total_slots": service.configuration.engine.max_num_seqs,
        "model_alias": service.name,
        "model_path": service.configuration.engine.model or service.name,
        "modalities": {"vision": service.sees_images, "audio": False},
        "chat_template": tokenizer.template_source or "",
        **({"chat_template_tool_use": tokenizer.templates[TOOL_USE]} if TOOL_USE in tokenizer.templates else {}),
        "bos_token": tokenizer.special.get("bos_token", ""),
        "eos_token": tokenizer.special.get("eos_token", ""),
        "build_info": f"penstock {__version__}",
        "is_sleeping": False,
    }


def slots(service: ServedModel) -> list[dict[str, Any]]:
    """The response of ``/slots``: one slot per sequence that may run at the same time. The number of busy slots is the
    number of running sequences; slots are not assigned to particular sequences."""
    running = service.gateway.engine_pool.stats.running
    length = service.gateway.engine_pool.known_engine().max_model_len
    return [
        {"id": i, "id_task": -1, "n_ctx": length, "speculative": False, "is_processing": i < running}
        for i in range(service.configuration.engine.max_num_seqs)
    ]
