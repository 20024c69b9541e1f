"""Profile of Ascend-vLLM (vLLM 0.5 by Huawei): flags of its API servers, and variables of ``start_servers.sh``."""

from __future__ import annotations

from . import Alias, Profile, one_of
from .vllm import FLAGS, together
from .vllm_variables import PREFIXES, VARIABLES

PROFILE = Profile(
    name="ascend-vllm",
    title="vLLM",
    defaults={
        "enable_prefix_caching": False,
        "require_model": True,
        "generation_config": "vllm",
        "guided_decoding_disable_additional_properties": True,
    },
    flags=FLAGS,
    variables={
        **VARIABLES,
        "USE_OPENAI": Alias("require_model", one_of({"0": False, "1": True})),
        "GLOBAL_RANK_TABLE_FILE_PATH": Alias("global_rank_table"),
        "RANK_TABLE_FILE_PATH": Alias("rank_table"),
        "NODE_PORTS": Alias("node_ports"),
    },
    prefixes=PREFIXES,
    together=together,
)
