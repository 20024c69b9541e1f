"""docs/devices.md: which feature runs on which device. ``python tests/docs/test_devices.py`` writes its tables.

A cell is made of

- the message with which the real checks refuse the feature: those of the options (``checked_options``), of the load
  (``load_models``, up to the weights, with a simulated GPU) and of the backends (``pack``, ``supports``,
  ``new_kv_cache``);
- otherwise the tests that run it, which must exist, and for GPUs what benchmarks/HISTORY.md reports of a card.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # pytest does this (pyproject.toml, conftest.py)
    folders = ("support", "engine", "kernels", "models")
    sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in folders]
    os.environ["TRITON_INTERPRET"] = "1"

import interpreted  # noqa: F401 - must precede the kernels
import pytest
import test_cuda_matrix
import torch
from quantized import KINDS, quantize
from repository import ROOT, TESTS
from test_quantized_checkpoints import ON_CPU

from penstock.checkpoint.gguf_file import TYPES
from penstock.config.options import EngineOptions
from penstock.core import PenstockError
from penstock.core.quantization import SCHEMES, Format
from penstock.engine.checks.options import checked_options
from penstock.engine.worker import loading
from penstock.models import read_config
from penstock.models.weights import Checkpoint
from penstock.models.weights.lora import _module
from penstock.ops import KVSpec, cuda, reference
from penstock.parallel import SINGLE_RANK, SingleRank
from penstock.quant import read_quantization_config

cpu: Any = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

PAGE = ROOT / "docs/devices.md"
BFLOAT16_HEADS = ("awq g32", "gptq asymmetric, act-order, v2", "compressed-tensors w8a16 channel")
"""Parameters of ``test_quantized_lm_head_in_bfloat16_is_as_accurate_as_transformers``."""
CARD = (ROOT / "benchmarks/HISTORY.md").read_text(encoding="utf-8").partition("### What was checked on it\n")[2]
CARD = " ".join(CARD.partition("\n#")[0].split())
"""Text of benchmarks/HISTORY.md about the checks on a real GPU, as one line."""
COLUMNS = {"CPU, native kernels": "cpu", "CPU, plain PyTorch": "reference", "NVIDIA GPU": "cuda"}
BACKENDS: dict[str, Any] = {"cpu": cpu, "reference": reference, "cuda": cuda}
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 256}
DECODER = SIZES | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = DECODER | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
MOE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
BERT = SIZES | {"architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 14,
}
IMAGES = DECODER | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
IMAGES |= {"vision_config": VISION, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
SPEECH = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 300,
    "d_model": 64,
}
SPEECH |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 96))}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 80}
LATENT = DECODER | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 32}
LATENT |= {
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
LATENT |= {"n_routed_experts": 4, "first_k_dense_replace": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPARSE = LATENT | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 16}
SPARSE |= {"index_n_heads": 2, "index_head_dim": 16, "n_group": 1, "topk_group": 1}
DELTA_NET = DECODER | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
COMPRESSED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 300,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.5,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "max_position_embeddings": 512,
}
TENSOR = r"base_model\.\S+"
Check = Callable[[str], None]
"""Raises ``PenstockError`` if a backend (a value of ``COLUMNS``) refuses the feature."""


@dataclass(frozen=True)
class Feature:
    """A row of a table. Tests are named FOLDER/FILE::TEST, relative to tests/, without the prefixes ``test_`` and
    without ``.py``."""

    name: str
    cpu: str = ""
    """Test of the whole model on this backend."""
    plain: str = ""
    gpu: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    """Kernel tests by backend, for backends without a test of a whole model."""
    card: str = ""
    """Phrase in ``CARD`` that reports a run of a whole model with this feature."""
    kernels_on_card: str = ""
    """Phrase in ``CARD`` that reports a run of the kernels."""
    check: Check | None = None
    missing: Callable[[Any], bool] | None = None
    """True if a backend lacks the feature without refusing it with an error."""
    forms: dict[str, str] = field(default_factory=dict)
    """How the weights are kept in memory, by backend: "as stored" or "dequantized"."""

    def tests(self) -> dict[str, str]:
        return {name: test for name, test in zip(BACKENDS, (self.cpu, self.plain, self.gpu), strict=True) if test}


# --- Checks that refuse -----------------------------------------------------------------------------------------------


class Accepted(Exception):
    """All checks before the weights have passed."""


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Simulate an H100 for the checks of a model load. The KV cache is allocated on the device ``meta``."""
    new_kv_cache, none = cuda.new_kv_cache, lambda *_: None
    with (
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.device_count", lambda: 1),
        patch("torch.cuda.set_device", none),
        patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        patch.object(cuda, "new_kv_cache", lambda specs, blocks, _: new_kv_cache(specs, blocks, torch.device("meta"))),
    ):
        yield


def load(config: dict[str, Any], ranks: int = 1, **options: Any) -> Check:
    """Return a check that loads a model with these options, as an engine does at its start, up to the weights.

    Args:
        ranks: size of the group of ranks; more than 1: the check loads one rank of a group on several nodes.
    """

    def check(backend: str) -> None:
        def accept(*_: Any) -> None:
            raise Accepted

        with TemporaryDirectory() as folder, simulated_gpu(), patch.object(loading, "load_model", accept):
            (Path(folder) / "config.json").write_text(json.dumps(config))
            device = "cuda" if backend == "cuda" else "cpu"
            read = read_config(Path(folder), options.get("model_impl", "auto"))
            chosen = EngineOptions(model=folder, device=device, ops=backend, **options)
            group = SingleRank(size=ranks) if ranks > 1 else SINGLE_RANK
            try:
                loading.load_models(checked_options(chosen, read, Path(folder)), group)
            except Accepted:
                return
            raise AssertionError("no weights are read")

    return check


def packs(format: Format, dtype: torch.dtype = torch.bfloat16) -> Check:
    """Return a check that quantizes weights at load."""

    def check(backend: str) -> None:
        BACKENDS[backend].pack([torch.zeros(64, 128, dtype=dtype)], None, format)

    return check


def caches(quantization: str) -> Check:
    def check(backend: str) -> None:
        specs = [KVSpec(2, 64, "bfloat16", quantization=quantization)]
        BACKENDS[backend].new_kv_cache(specs, 1, torch.device("cpu"))

    return check


def expert_adapters(backend: str) -> None:
    """Load a LoRA tensor of an expert: it is refused on devices other than CPUs."""
    from penstock.layers import BuildContext

    device = torch.device("cuda" if backend == "cuda" else "cpu")
    context = SimpleNamespace(
        max_loras=1, max_lora_rank=8, device=device, expert_parallel=False, ops=reference, dtype=torch.float32
    )
    context.lora_targets = {}
    shard = SimpleNamespace(size=32)
    name = "model.layers.0.mlp.experts.0.gate_proj"
    BuildContext.expert_lora(context, [[name]], 64, shard)  # type: ignore[arg-type]
    _module(f"base_model.model.{name}.lora_A.weight", context.lora_targets)


def permuted_experts(backend: str) -> None:
    weight = test_cuda_matrix.draw_quantized(0, 64, 64, Format(4, 32), torch.arange(64))
    BACKENDS[backend].stack_experts([BACKENDS[backend].pack_quantized([weight], torch.bfloat16)] * 2)


# --- Rows -------------------------------------------------------------------------------------------------------------

PLAIN = "engine/reference_backend::tokens_equal_cpu_kernels"
FP8 = "engine/reference_backend::fp8_without_cpu_kernels_keeps_answer"
GPU, MORE = "kernels/cuda_engine", "kernels/cuda_features"
OTHERS = f"{GPU}::grammar_beam_lora_and_draft_results_do_not_depend_on_others"
ALONE = f"{GPU}::results_do_not_depend_on_other_requests"
LONG = f"{GPU}::results_of_long_prompts_do_not_depend_on_other_requests"
HEADS = f"{MORE}::draft_heads_do_not_change_tokens"
PROCESSES = f"{MORE}::tokens_of_several_processes_equal_reference_backend"
ANY_BATCH = "engine/exactness::results_do_not_depend_on_batch"
BATCHES = "in batches of 1 to 256 sequences"
SHORTENED = "for shortened Llama-3.1-8B, Qwen3-30B-A3B (experts) and DeepSeek-V2-Lite (latent attention) in bf16"
MEASURED = "for Qwen3-0.6B in bf16, fp8, int8 and int4"
FORMATS = "all weight formats of `--quantization`"
LOGPROBS = "logprobs_and_greedy_tokens_match_transformers"
STORED = "models/quantized_checkpoints::quantized_model_matches_transformers_on_dequantized_weights"
STORED_BF16 = "models/quantized_checkpoints::quantized_lm_head_in_bfloat16_is_as_accurate_as_transformers"
DEQUANTIZED = "models/quantized_checkpoints::dequantized_weights_equal_format_definition"


def models() -> list[Feature]:
    return [
        Feature(
            "dense decoders",
            f"models/models::{LOGPROBS}",
            f"models/models::{LOGPROBS}",
            f"{GPU}::tokens_equal_reference_backend",
            card=MEASURED,
            check=load(DECODER),
        ),
        Feature(
            "[mixture of experts](experts.md)",
            "models/experts::family_matches_transformers",
            "models/experts::family_matches_transformers",
            PROCESSES,
            card=SHORTENED,
            check=load(MOE),
        ),
        Feature(
            "latent attention (DeepSeek, Kimi-K2)",
            f"models/models::{LOGPROBS}",
            f"models/models::{LOGPROBS}",
            f"{MORE}::tokens_of_latent_attention_equal_reference_backend",
            card=SHORTENED,
            check=load(LATENT),
        ),
        Feature(
            "[sparse attention](models.md#sparse-attention) (DeepSeek-V3.2, GLM-5)",
            f"models/models::{LOGPROBS}",
            f"models/models::{LOGPROBS}",
            f"{MORE}::tokens_of_latent_attention_equal_reference_backend",
            check=load(SPARSE),
        ),
        Feature(
            "compressed attention (DeepSeek-V4)",
            "models/compressed_attention::model_matches_transformers",
            "models/compressed_attention::reference_ops_match_cpu_kernels",
            f"{MORE}::tokens_of_compressed_attention_equal_reference_backend",
            check=load(COMPRESSED),
        ),
        Feature(
            "[recurrent state](models.md#recurrent-state)",
            "models/state_families::family_matches_transformers",
            f"{MORE}::tokens_of_recurrent_layers_equal_reference_backend",
            f"{MORE}::tokens_of_recurrent_layers_equal_reference_backend",
            check=load(DELTA_NET),
        ),
        Feature(
            "[encoders](embeddings.md): embeddings",
            "models/encoders::embeddings_match_hidden_states_of_transformers",
            "models/encoders::embeddings_match_hidden_states_of_transformers",
            f"{MORE}::embeddings_of_encoder_equal_reference_backend",
            check=load(BERT),
        ),
        Feature(
            "encoders: classes, scores of pairs",
            "models/encoders::class_probabilities_match_transformers",
            f"{MORE}::class_probabilities_of_encoder_equal_cpu_kernels",
            f"{MORE}::class_probabilities_of_encoder_equal_cpu_kernels",
            check=load(BERT),
        ),
        Feature(
            "decoders: embeddings",
            "engine/embed::embeddings_equal_pooled_hidden_states_of_transformers",
            "engine/embed::embeddings_equal_pooled_hidden_states_of_transformers",
            f"{MORE}::embeddings_of_decoder_equal_reference_backend",
            check=load(DECODER),
        ),
        Feature(
            "[images](multimodal.md)", f"models/images::{LOGPROBS}", f"models/images::{LOGPROBS}", check=load(IMAGES)
        ),
        Feature("[videos](multimodal.md)", f"models/videos::{LOGPROBS}", check=load(IMAGES)),
        Feature("[speech](audio.md) (Whisper)", "models/speech::tokens_match_transformers", check=load(SPEECH)),
        Feature(
            "[models of transformers](transformers.md)",
            "models/transformers_models::tokens_and_logprobs_match_transformers",
            "models/transformers_models::longrope_with_reference_ops_matches_transformers",
            f"{MORE}::tokens_of_transformers_model_equal_reference_backend",
            check=load(DECODER, model_impl="transformers"),
        ),
    ]


def requests() -> list[Feature]:
    lora = "engine/lora::logprobs_and_greedy_tokens_equal_peft"
    expert_lora = "engine/lora_experts::logprobs_and_greedy_tokens_equal_peft"
    offloading = "engine/kv_offloading::evicted_blocks_are_loaded_from_host_memory"
    return [
        Feature(
            "same bits in any batch",
            ANY_BATCH,
            gpu=ALONE,
            card=BATCHES,
            missing=lambda backend: not backend.BATCH_INVARIANT,
        ),
        Feature(
            "step planned while the one before is computed",
            gpu=ALONE,
            card="with one and two steps in flight",
            missing=lambda backend: not backend.ASYNCHRONOUS,
        ),
        Feature(
            "sampling, penalties",
            "engine/sampler::token_frequencies_equal_distribution_of_transformers",
            PLAIN,
            ALONE,
            card="greedy and sampled",
        ),
        Feature(
            "log probabilities of output and prompt",
            f"models/models::{LOGPROBS}",
            PLAIN,
            ALONE,
            card="log probabilities",
        ),
        Feature(
            "[guided decoding](features.md#guided-decoding)",
            "engine/guided::output_satisfies_constraint",
            PLAIN,
            OTHERS,
            kernels_on_card="sampling",
        ),
        Feature("beam search", "engine/search::beams_equal_beams_of_transformers", PLAIN, OTHERS),
        Feature(
            "[LoRA adapters](features.md#lora-adapters)",
            lora,
            lora,
            OTHERS,
            kernels_on_card="LoRA",
            check=load(DECODER, enable_lora=True),
        ),
        Feature("LoRA adapters of experts", expert_lora, expert_lora, check=expert_adapters),
        Feature(
            "chunked prefill",
            "engine/llm::chunked_prefill_and_small_batches_keep_answers",
            PLAIN,
            LONG,
            card="in chunks",
        ),
        Feature(
            "[prefix cache](serving/prefix_cache.md)", ANY_BATCH, PLAIN, ALONE, card="with and without cached prefixes"
        ),
        Feature("prefixes in host memory", offloading, PLAIN, f"{GPU}::prefix_is_restored_from_host_memory"),
        Feature("prefixes on a disk", "engine/kv_offloading::blocks_on_disk_are_found_after_restart"),
        Feature(
            "preemption by recomputation",
            "engine/exactness::at_least_a_fifth_of_sequences_are_preempted",
            PLAIN,
            OTHERS,
        ),
        Feature("preemption by swapping", "engine/speculation::drafts_do_not_change_outputs", PLAIN, LONG),
        Feature(
            "[sleep and wake up](serving/changing_weights.md)",
            "engine/weights::sleep_and_wake_up_do_not_change_outputs",
        ),
        Feature("weights changed while serving", "engine/weights::update_from_folder_or_tensors_equals_new_engine"),
    ]


def speculation() -> list[Feature]:
    drafts, heads = (
        "engine/speculation::drafts_do_not_change_outputs",
        "engine/speculative_heads::drafts_do_not_change_outputs",
    )
    tree = "engine/token_trees::tree_drafts_do_not_change_outputs"
    return [
        Feature("n-grams", drafts, PLAIN, ALONE),
        Feature("draft model", drafts, PLAIN, OTHERS),
        Feature("MTP layers", "engine/speculation::mtp_drafts_do_not_change_outputs", HEADS, HEADS),
        Feature("EAGLE and EAGLE-3 heads", heads, HEADS, HEADS),
        Feature("Medusa heads", heads, HEADS, HEADS),
        Feature("trees of draft tokens", tree, tree, HEADS),
    ]


def weights() -> list[Feature]:
    kernels = {"cpu": "kernels/ops::quantized_linear_matches_reference_in_any_batch"}
    rows = [
        Feature(
            "`--dtype bfloat16`", ANY_BATCH, "models/models::bfloat16_error_is_near_that_of_transformers", card=MEASURED
        ),
        Feature(
            "`--dtype float16`",
            gpu=LONG,
            kernels_on_card="float16",
            check=packs(Format(), torch.float16),
        ),
        Feature(
            "`--dtype float32`", ANY_BATCH, PLAIN, f"{GPU}::tokens_equal_reference_backend", kernels_on_card="float32"
        ),
    ]
    names = {"w8a8": "int8", "w4a8": "", "wint8": "", "wint4": "int4", "fp8": "fp8"}
    assert names.keys() == {name for name in SCHEMES if not name.endswith("-g32")} - {"none"}
    for name, measured in names.items():
        rows.append(
            Feature(
                f"`--quantization {name}`",
                "" if name == "fp8" else ANY_BATCH,
                FP8 if name == "fp8" else PLAIN,
                LONG,
                kernels,
                card=MEASURED if measured else "",
                kernels_on_card=FORMATS,
                check=packs(SCHEMES[name].layers),
            )
        )
    for name in ("wint8", "wint4"):
        rows.append(
            Feature(
                f"`--quantization {name} --dtype float32`",
                kernels={"cuda": "kernels/cuda_matrix::products_and_embeddings_match_reference"},
                kernels_on_card="float32",
                check=packs(SCHEMES[name].layers, torch.float32),
            )
        )
    return rows


CHECKPOINTS = {
    "AWQ": "awq g32",
    "GPTQ, 4 bits": "gptq",
    "GPTQ, 4 bits, zero points, groups of 16": "gptq asymmetric",
    "GPTQ, 4 bits, zero points, act-order": "gptq asymmetric, act-order, v2",
    "GPTQ, 8 bits, groups": "gptq 8 bits, act-order",
    "GPTQ, 2 and 3 bits": "gptq 3 bits",
    "compressed-tensors, w4a16": "compressed-tensors w4a16",
    "compressed-tensors, w8a16 by channel": "compressed-tensors w8a16 channel",
    "compressed-tensors, w8a8": "compressed-tensors w8a8",
    "compressed-tensors, w8a8, zero points": "compressed-tensors w8a8 asymmetric",
    "FP8, a scale per output (compressed-tensors, FBGEMM)": "fp8 a scale an output",
    "FP8, a scale per matrix (also Model Optimizer)": "fp8 one scale",
    "FP8, blocks of 128 × 128 (DeepSeek-V3)": "fp8 blocks of 128",
    "bitsandbytes, nf4 and fp4": "bitsandbytes nf4",
    "bitsandbytes, 8 bits": "bitsandbytes int8",
}
"""Kind of checkpoint (key of ``KINDS`` in ``tests/support/quantized.py``) whose format each row describes, by row."""
ON_CARD = ("FP8, blocks", "FP8, a scale per output")


def checkpoints() -> list[Feature]:
    rows = []
    for name, kind in CHECKPOINTS.items():
        with TemporaryDirectory() as folder:
            quantize(Path(folder), KINDS[kind])
            checkpoint = Checkpoint(
                Path(folder), read_quantization_config(read_config(Path(folder)).quantization_config)
            )
            rows.append(stored(name, checkpoint.format_of("model.layers.0.mlp.up_proj"), kind))
    mxfp4 = next(type.format for type in TYPES.values() if type.name == "MXFP4")
    rows.append(stored("mxfp4 (gpt-oss)", mxfp4, "mxfp4"))
    kinds: dict[tuple[str, str], list[str]] = {}
    for type in TYPES.values():
        if type.format.bits and type.name != "MXFP4":
            kinds.setdefault((form("cpu", type.format), form("cuda", type.format)), []).append(type.name)
    for names in kinds.values():
        format = next(type.format for type in TYPES.values() if type.name == names[0])
        rows.append(stored(f"[GGUF](quantization.md#gguf): {', '.join(f'`{name}`' for name in names)}", format, "gguf"))
    rows.append(
        Feature(
            "GPTQ with act-order, of experts",
            "models/experts::quantized_experts_match_their_dequantized_weights",
            check=permuted_experts,
        )
    )
    return rows


def form(backend: str, format: Format) -> str:
    """How a backend keeps weights of this format in a bfloat16 model: "as stored" or "dequantized"."""
    return "as stored" if BACKENDS[backend].supports(format, torch.bfloat16) else "dequantized"


def stored(name: str, format: Format, kind: str) -> Feature:
    """Row about a format of checkpoints."""
    forms = {backend: form(backend, format) for backend in ("cpu", "cuda")}
    kernels, on_card, plain = dict[str, str](), "", STORED
    whole = DEQUANTIZED if forms["cpu"] == "dequantized" else ""
    if kind == "gguf":
        whole, plain = "models/gguf::model_of_mixed_types_matches_transformers", ""
    elif kind == "mxfp4":
        whole, plain, on_card = "models/mxfp4::bfloat16_error_is_near_that_of_transformers", "", "mxfp4"
    elif kind in BFLOAT16_HEADS:
        whole = STORED_BF16
    elif kind in ON_CPU and format.activation_bits:
        whole = STORED
    if forms["cpu"] == "as stored":
        kernels["cpu"] = "kernels/ops::checkpoint_weights_match_reference_in_any_batch"
    if forms["cuda"] == "as stored":
        kernels["cuda"] = "kernels/cuda_matrix::checkpoint_weights_match_reference_in_any_batch"
        on_card = on_card or (FORMATS if name.startswith(ON_CARD) else "")
    return Feature(name, whole, plain, kernels=kernels, kernels_on_card=on_card, forms=forms)


def kv_caches() -> list[Feature]:
    kernels = "KV caches in int8 and fp8"
    return [
        Feature("`--kv-cache-dtype auto`", ANY_BATCH, PLAIN, ALONE, card=MEASURED, check=caches("")),
        Feature("`--kv-cache-dtype int8`", ANY_BATCH, PLAIN, ALONE, kernels_on_card=kernels, check=caches("int8")),
        Feature("`--kv-cache-dtype fp8`", "", FP8, LONG, kernels_on_card=kernels, check=caches("fp8")),
    ]


def processes() -> list[Feature]:
    ranks = "engine/ranks::ranks_give_bits_of_one_rank"
    return [
        Feature(
            "[tensor parallelism](serving/parallelism.md)",
            ranks,
            PLAIN,
            f"{GPU}::tensor_parallel_tokens_equal_single_rank",
            check=load(DECODER, tensor_parallel_size=2),
        ),
        Feature("pipeline parallelism", ranks, PLAIN, PROCESSES, check=load(DECODER, pipeline_parallel_size=2)),
        Feature(
            "expert parallelism",
            "engine/expert_parallel::expert_placement_changes_neither_bits_nor_load",
            "",
            PROCESSES,
            check=load(MOE, tensor_parallel_size=2, enable_expert_parallel=True),
        ),
        Feature("data parallelism", "engine/data_parallel::data_parallel_answers_equal_single_engine"),
        Feature(
            "ranks on several nodes",
            "engine/nodes::nodes_give_bits_of_one_rank",
            check=load(DECODER, ranks=2, tensor_parallel_size=2),
        ),
        Feature(
            "[prefill and decode instances](serving/prefill_decode.md)",
            "engine/prefill_decode::prefill_decode_results_equal_single_engine",
            kernels={
                "reference": "engine/kv_export::imported_kv_gives_same_hidden_states",
                "cuda": "kernels/cuda_attention::kv_cache_export_and_import_match_reference",
            },
            check=load(DECODER, role="prefill"),
        ),
        Feature(
            "[engine folders](serving/models.md#engine-folders)",
            "engine/engine_folder::engine_folder_answers_equal_deleted_checkpoint",
            "engine/engine_folder::engine_folder_answers_equal_deleted_checkpoint",
        ),
    ]


SECTIONS: dict[str, Callable[[], list[Feature]]] = {
    "Models": models,
    "Requests and scheduling": requests,
    "Speculative decoding": speculation,
    "Data types and quantization at load": weights,
    "Quantized checkpoints": checkpoints,
    "KV cache": kv_caches,
    "Several processes": processes,
}


# --- Cells ------------------------------------------------------------------------------------------------------------


def cell(feature: Feature, backend: str) -> str:
    if feature.missing and feature.missing(BACKENDS[backend]):
        return "no"
    if feature.check:
        try:
            feature.check(backend)
        except PenstockError as error:
            assert backend not in feature.tests(), feature.name
            return f"refused: `{re.sub(TENSOR, '…', error.failure.message)}`"
    test, kernels = feature.tests().get(backend, ""), feature.kernels.get(backend, "")
    for each in (test, kernels):
        assert not each or exists(each), each
    if backend == "cuda":
        found = on_gpu(feature, bool(test), bool(kernels))
    else:
        found = "tested" if test else "kernels tested" if kernels else "not tested"
    return ", ".join(part for part in (feature.forms.get(backend, ""), found) if part)


def on_gpu(feature: Feature, test: bool, kernels: bool) -> str:
    for words in (feature.card, feature.kernels_on_card):
        assert words in CARD, words
    if feature.card:
        return "H100"
    if feature.kernels_on_card:
        return "interpreter; kernels: H100" if test else "kernels: H100"
    return "interpreter" if test else "kernels: interpreter" if kernels else "not run"


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(test: str) -> bool:
    file, name = test.split("::")
    folder, stem = file.split("/")
    return f"test_{name}" in functions(f"{folder}/test_{stem}.py")


def tables() -> dict[str, str]:
    """Table of each section."""
    head = f"| | {' | '.join(COLUMNS)} |\n|---|---|---|---|\n"
    found = {}
    for section, rows in SECTIONS.items():
        cells = ([feature.name, *(cell(feature, backend) for backend in COLUMNS.values())] for feature in rows())
        found[section] = head + "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return found


def written(text: str) -> dict[str, str]:
    """Tables of the page by section."""
    parts = text.split("\n## ")[1:]
    return {
        part.partition("\n")[0]: "".join(f"{line}\n" for line in part.splitlines() if line[:1] == "|") for part in parts
    }


def test_device_tables_match_checks_and_tests() -> None:
    """To update the page: ``python tests/docs/test_devices.py``."""
    found = written(PAGE.read_text(encoding="utf-8"))
    assert {section: found[section] for section in SECTIONS} == tables()


if __name__ == "__main__":
    text, made = PAGE.read_text(encoding="utf-8"), tables()
    for section, table in written(text).items():
        if section in made:
            text = text.replace(table, made[section])
    PAGE.write_text(text, encoding="utf-8")
