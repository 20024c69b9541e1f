"""Sparse attention: DeepSeek-V3.2 and GLM-5 compared with transformers, and kernels with the reference ops.

transformers' top-k breaks ties in any order, and scores of zero are frequent with few index heads. The tests therefore
replace ``Tensor.topk`` in its indexers by a stable sort: of equal scores, the first positions are selected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_models
import torch
from test_latent_attention import EXPERTS, LATENT, SCALED, save_with_bias
from torch import Tensor
from transformers import DeepseekV32Config, GlmMoeDsaConfig, PreTrainedConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from penstock.frontend.llm import LLM

SPARSE = LATENT | {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 32, "n_group": 1, "topk_group": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "v3.2": DeepseekV32Config(**SPARSE),
    "v3.2, one head, biases, yarn": DeepseekV32Config(
        **SPARSE | {"index_n_heads": 1, "index_topk": 8}, **SCALED, attention_bias=True
    ),
    "v3.2, experts": DeepseekV32Config(**SPARSE | EXPERTS | {"index_head_dim": 16}),
    "glm-5": GlmMoeDsaConfig(**SPARSE),
    "glm-5, shared selection, experts": GlmMoeDsaConfig(
        **SPARSE | EXPERTS | {"num_hidden_layers": 5, "index_topk": 32}, indexer_types=["full", "shared"] * 2 + ["shared"]
    ),
    "glm-5, last layer selects": GlmMoeDsaConfig(**SPARSE, index_topk_pattern="FSF"),
}

ops = test_models.ops
test_logprobs_and_greedy_tokens_match_transformers = test_models.test_logprobs_and_greedy_tokens_match_transformers
test_bfloat16_error_is_near_that_of_transformers = test_models.test_bfloat16_error_is_near_that_of_transformers


@pytest.fixture(scope="module", autouse=True)
def stable_topk() -> Iterator[None]:
    """Select the first of equal scores in transformers' models."""

    def topk(scores: Tensor, k: int, dim: int = -1) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk)
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, ops: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_with_bias(CONFIGS[request.param], folder)
    options = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100, "max_num_batched_tokens": 50}
    return LLM(folder, ops=ops, **options), model
