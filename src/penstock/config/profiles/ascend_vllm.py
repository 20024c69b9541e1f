"""vLLM 0.5 as Huawei's Ascend documents it: the flags of its API servers, and of ``start_servers.sh``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import invalid

from . import COMBINED, Alias, Profile, Settings, ignored, one_of
from .vllm import COLLECTIVES, FLAGS, LENGTHS, VARIABLES


def _speculative(given: Mapping[str, str]) -> Settings:
    model = given.get("--speculative_model")
    numbers = {
        "num_speculative_tokens": given.get("--num_speculative_tokens"),
        "prompt_lookup_max": given.get("--ngram_prompt_lookup_max"),
        "prompt_lookup_min": given.get("--ngram_prompt_lookup_min"),
    }
    result: dict[str, Any] = {}
    for name, text in numbers.items():
        if text is None:
            continue
        if model is None:
            raise invalid(f"--{name}", "requires --speculative-model")
        if not text.isdecimal():
            raise invalid(f"--{name}", f"{text!r} is not a number")
        result[name] = int(text)
    if model is not None:
        result |= {"method": "ngram"} if model == "[ngram]" else {"method": "draft_model", "model": model}
        yield "speculative_config", json.dumps(result), "--speculative_model"


PROFILE = Profile(
    name="ascend-vllm",
    title="vLLM",
    defaults={
        "enable_prefix_caching": False,
        "require_model": True,
        "generation_config": "vllm",
        "guided_decoding_disable_additional_properties": True,
    },
    flags={
        **FLAGS,
        "speculative_model": COMBINED,
        "num_speculative_tokens": COMBINED,
        "ngram_prompt_lookup_max": COMBINED,
        "ngram_prompt_lookup_min": COMBINED,
        "worker_use_ray": ignored(COLLECTIVES, switch=True),
        "max_context_len_to_capture": ignored(LENGTHS),
        "use_v2_block_manager": ignored("there is one KV cache manager", switch=True),
    },
    variables={
        **VARIABLES,
        "USE_OPENAI": Alias("require_model", one_of({"0": False, "1": True})),
        "GLOBAL_RANK_TABLE_FILE_PATH": Alias("global_rank_table"),
        "RANK_TABLE_FILE_PATH": Alias("rank_table"),
        "NODE_PORTS": Alias("node_ports"),
    },
    together=_speculative,
)
