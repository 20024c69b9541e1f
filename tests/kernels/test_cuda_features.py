"""Model types and drafters on the CUDA backend, in Triton's interpreter: results equal those of the reference backend.
``docs/devices.md`` shows which features are tested here (``tests/docs/test_devices.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import encoder_checkpoints
import interpreted  # noqa: F401 - must precede the kernels
import pytest
import state_families
import test_compressed_attention
import test_sparse_attention
import test_speculative_heads as heads
import torch
from checkpoints import SMALL, save
from test_latent_attention import CONFIGS, save_with_bias
from test_speculation import with_head
from transformers import BertConfig, ModernBertConfig, Qwen3Config, Qwen3MoeConfig

from penstock import LLM, SamplingParams

FIXED: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weight_cache_dir": "none", "max_model_len": 64}
FIXED |= {"num_gpu_blocks_override": 40, "block_size": 16, "cudagraph_capture_sizes": (4,)}
PROMPTS = [[5, 6, 7], [*range(2, 30)]]


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    llm = LLM(folder, **FIXED | options)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    if "speculative_config" in options:
        assert llm.engine.scheduler.speculation and llm.engine.scheduler.speculation.stats.draft_tokens
    llm.engine.close()
    return [output.outputs[0].token_ids for output in outputs]


def vectors(folder: Path, **options: Any) -> list[torch.Tensor]:
    outputs = LLM(folder, **FIXED | options).embed(PROMPTS, use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**encoder_checkpoints.SIZES, max_position_embeddings=320),
        pytest.param(
            ModernBertConfig(
                **encoder_checkpoints.SIZES, **encoder_checkpoints.OF_MODERNBERT, max_position_embeddings=512
            ),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["bert", "modernbert"],
)
def test_embeddings_of_encoder_equal_reference_backend(config: Any, tmp_path: Path) -> None:
    encoder_checkpoints.save_encoder(config, tmp_path)
    for ours, theirs in zip(vectors(tmp_path, ops="cuda"), vectors(tmp_path, ops="reference"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_class_probabilities_of_encoder_equal_cpu_kernels(tmp_path: Path) -> None:
    config = BertConfig(**encoder_checkpoints.SIZES, max_position_embeddings=320)
    encoder_checkpoints.save_encoder(config, tmp_path, labels=3)
    found = {}
    for ops in ("cpu", "reference", "cuda"):
        outputs = LLM(tmp_path, ops=ops, **FIXED).classify(PROMPTS, use_tqdm=False)
        found[ops] = torch.tensor([output.outputs.probs for output in outputs])
    for ops in ("reference", "cuda"):
        torch.testing.assert_close(found[ops], found["cpu"], atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_embeddings_of_decoder_equal_reference_backend(tmp_path: Path) -> None:
    save(Qwen3Config(**SMALL, head_dim=16), tmp_path)
    for ours, theirs in zip(vectors(tmp_path, ops="cuda"), vectors(tmp_path, ops="reference"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["v3", "v2, experts in groups", "v3.2", "glm-5, shared selection, experts"])
def test_tokens_of_latent_attention_equal_reference_backend(name: str, tmp_path: Path) -> None:
    save_with_bias((CONFIGS | test_sparse_attention.CONFIGS)[name], tmp_path)
    assert tokens(tmp_path, ops="cuda") == tokens(tmp_path, ops="reference")


@pytest.mark.thorough
def test_tokens_of_compressed_attention_equal_reference_backend(tmp_path: Path) -> None:
    test_compressed_attention.save_v4(tmp_path)
    assert tokens(tmp_path, ops="cuda") == tokens(tmp_path, ops="reference")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "Mamba2",
        *(
            pytest.param(family, marks=pytest.mark.thorough)
            for family in ("Qwen3Next", "KimiLinear", "MiniMax", "Jamba", "RecurrentGemma", "Lfm2", "FalconH1")
        ),
    ],
)
def test_tokens_of_recurrent_layers_equal_reference_backend(family: str, tmp_path: Path) -> None:
    state_families.draw(family, 0, tmp_path)
    assert tokens(tmp_path, ops="cuda") == tokens(tmp_path, ops="reference")


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Qwen3", "Jamba"])
def test_tokens_of_transformers_model_equal_reference_backend(family: str, tmp_path: Path) -> None:
    """Jamba, with recurrent states, is run one sequence at a time."""
    if family == "Qwen3":
        save(Qwen3Config(**SMALL, head_dim=16), tmp_path)
    else:
        state_families.draw(family, 0, tmp_path)
    options = {"model_impl": "transformers"}
    assert tokens(tmp_path, ops="cuda", **options) == tokens(tmp_path, ops="reference", **options)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "mtp", "tree"])
def test_draft_heads_do_not_change_tokens(method: str, tmp_path: Path) -> None:
    """Tokens of both backends are those of the reference backend without drafts."""
    target, head = tmp_path / "target", tmp_path / "head"
    config: dict[str, Any] = {"method": "medusa" if method == "tree" else method, "num_speculative_tokens": 2}
    if method == "mtp":
        with_head(target, True)
    else:
        make = {"eagle3": heads.eagle3, "eagle": heads.eagle}.get(method, heads.medusa)
        make(head, save(heads.CONFIG, target), "published")
        config["model"] = str(head)
    if method == "tree":
        config |= {"speculative_token_tree": [(0,), (1,), (0, 0)]}
    given = json.dumps(config | {"adaptive": False})
    for ops in ("cuda", "reference"):
        assert tokens(target, ops=ops, speculative_config=given) == tokens(target, ops="reference"), ops


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}],
    ids=["stages", "experts"],
)
def test_tokens_of_several_processes_equal_reference_backend(options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 8}
    save(Qwen3MoeConfig(**SMALL, **sizes, sliding_window=None), tmp_path)
    assert tokens(tmp_path, ops="cuda", **options) == tokens(tmp_path, ops="reference")
