"""Gemma 4 and Gemma 3n: heads that differ between layers, shared keys and values, inputs of each layer, experts next to
the MLP, several residual streams, sparse activations."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SMALL, randomize, save
from families import gemma4_moe
from peft import LoraConfig, get_peft_model
from quantized import KINDS as QUANTIZED
from quantized import quantize_checkpoint
from safetensors.torch import load_file, save_file
from test_families import GREEDY, OPTIONS, PROMPTS, bfloat16_errors, check
from test_speculative_heads import eagle3
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

from penstock import LoRARequest, demo
from penstock.calibration.options import QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import EngineOptions
from penstock.core import PenstockError
from penstock.engine.engine_folder import build_engine
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.models.loader import LoadOptions, load_model
from penstock.ops import reference
from penstock.planning.kv_size import kv_specs, weight_bytes
from penstock.planning.model_size import model_size_of

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

KINDS = ["sliding_attention", "full_attention"]
FIELDS = SMALL | {
    "max_position_embeddings": 512,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 48,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": KINDS * 3,
    "sliding_window": 24,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
}
"""A small model with everything in which layers can differ, except experts. Layers 3 to 5 attend to the keys and values
of layers 1 and 2."""
FIELDS_3N = SMALL | {
    "max_position_embeddings": 512,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "intermediate_size": [96, 200, 128, 64, 96, 128],
    "layer_types": KINDS * 3,
    "sliding_window": 24,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
    "altup_active_idx": 1,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.9, 0.95, 0.0, 0.95, 0.0, 0.5],
}
"""The same for Gemma 3n."""
REPEATED = [prompt[:20] * 4 for prompt in PROMPTS if len(prompt) >= 20]
"""Prompts with repetitions, for drafts of n-grams."""
NGRAMS = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


def save_dense(name: str, folder: Path) -> Path:
    save(Gemma3nTextConfig(**FIELDS_3N) if name == "Gemma3n" else Gemma4TextConfig(**FIELDS), folder)
    return folder


@pytest.fixture(scope="module", params=["Gemma4", "Gemma3n"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense("Gemma4", tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense("Gemma3n", tmp_path_factory.mktemp("gemma3n"))


def outputs(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Greedy tokens and log probabilities."""
    llm = LLM(folder, **OPTIONS | options)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]


def draw_with_experts(seed: int, folder: Path) -> PreTrainedModel:
    model = save(gemma4_moe(Random(f"Gemma4 {seed}")), folder)
    model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(3))
def test_model_with_experts_matches_transformers(seed: int, tmp_path: Path) -> None:
    check(tmp_path, draw_with_experts(seed, tmp_path))


@pytest.mark.slow
def test_unified_model_matches_transformers(tmp_path: Path) -> None:
    fields = {name: value for name, value in FIELDS.items() if "per_layer_input" not in name}
    config = Gemma4UnifiedTextConfig(**fields | {"num_kv_shared_layers": 0})
    check(tmp_path, save(config, tmp_path))


def check_bits(folder: Path, experts: bool) -> None:
    expected = outputs(folder, REPEATED, max_num_batched_tokens=512, num_gpu_blocks_override=400)
    itself = {"model": str(folder), "num_speculative_tokens": 2, "adaptive": False}
    for options in (
        {"tensor_parallel_size": 2, "enable_expert_parallel": experts},
        {"pipeline_parallel_size": 2, "speculative_config": NGRAMS},
        {"tensor_parallel_size": 2} if experts else {"speculative_config": json.dumps(itself)},
    ):
        assert outputs(folder, REPEATED, **options) == expected, options


@pytest.mark.slow
def test_bits_do_not_depend_on_drafts_ranks_and_stages(folder: Path) -> None:
    check_bits(folder, experts=False)


@pytest.mark.slow
def test_bits_of_model_with_experts_do_not_depend_on_ranks_and_stages(tmp_path: Path) -> None:
    draw_with_experts(3, tmp_path)
    check_bits(tmp_path, experts=True)


@pytest.mark.slow
def test_cached_prefixes_are_found_on_disk_by_other_ranks(folder: Path, tmp_path: Path) -> None:
    """The KV cache of each layer has other sizes."""
    expected = outputs(folder, PROMPTS[3:5], max_num_batched_tokens=512)
    tiers = {"kv_offloading_size": 0.01, "kv_offloading_disk_path": str(tmp_path)}
    for ranks, cached in (({}, 0), ({"tensor_parallel_size": 2}, 96), ({"pipeline_parallel_size": 2}, 96)):
        llm = LLM(folder, **OPTIONS, **tiers, **ranks)
        with closing(llm.engine):
            found = llm.generate(PROMPTS[3:5], GREEDY, use_tqdm=False)
        assert [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found] == expected
        assert found[0].num_cached_tokens == cached


@pytest.mark.slow
@pytest.mark.parametrize("experts", [True, False], ids=["Gemma 4 with experts", "Gemma 3n"])
def test_engine_folder_has_the_same_bits(experts: bool, gemma3n: Path, tmp_path: Path) -> None:
    if experts:
        draw_with_experts(3, folder := tmp_path / "model")
    else:
        folder = gemma3n
    options: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2, "weight_cache_dir": "none"}
    build_engine(EngineOptions(model=str(folder), **options), tmp_path / "engine", workers=1, recorded={})
    assert outputs(tmp_path / "engine", REPEATED, tensor_parallel_size=2) == outputs(folder, REPEATED)


def test_planned_sizes_equal_sizes_of_loaded_model(gemma4: Path, gemma3n: Path, tmp_path: Path) -> None:
    draw_with_experts(3, tmp_path)
    for each in (gemma4, gemma3n, tmp_path):
        size, tensors = model_size_of(read_config_json(each)), load_file(each / "model.safetensors")
        assert model_size_of(read_config(each).raw) == size
        assert weight_bytes(size, dtype="float32") == sum(x.nbytes for x in tensors.values() if x.dim() > 1)
        model = load_model(each, reference, LoadOptions(load_format="dummy"))
        specs = [replace(spec, window=0) for spec in model.kv_specs(16, "int8")]
        assert kv_specs(size, 16, "int8", model.config.dtype) == specs and len(specs) == 3


def test_stages_that_split_shared_keys_and_values_are_refused(folder: Path) -> None:
    message = "the last 5 layers share keys and values, so the last stage must have at least these (is '3,3')"
    with pytest.raises(PenstockError, match=re.escape(f"pipeline_parallel_layers: {message}")):
        LLM(folder, **OPTIONS, pipeline_parallel_size=2, pipeline_parallel_layers="3,3")
    with pytest.raises(PenstockError, match="pipeline_parallel_size: is 3, but the last 5 of 6 layers share keys"):
        LLM(folder, **OPTIONS, pipeline_parallel_size=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "sets bidirectional attention"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5; the layers before need all layer types"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "per_layer_config sets sliding_window, which is not"),
        ({"per_layer_config": {"1": {"head_dim": 24}}}, "head_dim of layer 1 is 24; it must be a multiple of 16"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "layer 1 has 3 key-value heads; the number must div"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types has 'chunked_attention'"),
        ({"enable_moe_block": True}, "enable_moe_block is set, but num_experts and top_k_experts and moe_inter"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    fields: dict[str, Any], message: str, gemma4: Path, tmp_path: Path
) -> None:
    check_refused(gemma4, fields, message, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"altup_num_inputs": 9}, "altup_num_inputs is 9; supported are 2 to 8"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4; it must be from 0 to 3"),
        (
            {"activation_sparsity_pattern": [0.5]},
            "activation_sparsity_pattern has 1 entries; it must have",
        ),
        ({"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern has the value 1.0; it must be from 0 to"),
        ({"intermediate_size": [96] * 5}, "intermediate_size has 5 entries; it must have one for each of 6 layers"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0; it must be at least 1"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 entries; it must have one for each of 6 layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types has 'chunked_attention'"),
    ],
)
def test_unsupported_fields_of_gemma_3n_are_refused_by_name(
    fields: dict[str, Any], message: str, gemma3n: Path, tmp_path: Path
) -> None:
    check_refused(gemma3n, fields, message, tmp_path)


def check_refused(folder: Path, fields: dict[str, Any], message: str, changed: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(PenstockError, match=re.escape(message)):
        read_config(changed)


def test_quantize_refuses_different_heads_and_several_streams(gemma4: Path, gemma3n: Path, tmp_path: Path) -> None:
    for folder, message in ((gemma4, "layers with different heads"), (gemma3n, "several residual streams")):
        with pytest.raises(PenstockError, match=f"has {message}, which cannot be calibrated"):
            quantize(folder, tmp_path / "out", QuantizeOptions(method="gptq"), threads=1, progress=False)


def test_heads_that_read_residual_streams_of_gemma_3n_are_refused(gemma3n: Path, tmp_path: Path) -> None:
    eagle3(tmp_path, AutoModelForCausalLM.from_pretrained(gemma3n), "published")
    drafts = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2})
    with pytest.raises(PenstockError, match="heads that read hidden states of layers are not supported"):
        LLM(gemma3n, **OPTIONS, speculative_config=drafts)


@pytest.mark.slow_after(1)
def test_language_model_of_multimodal_gemma_3n_runs_and_images_are_refused(gemma3n: Path, tmp_path: Path) -> None:
    """The checkpoint has the names of the composite model, whose vision tower transformers builds with timm."""
    tensors = load_file(gemma3n / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((gemma3n / "config.json").read_text())
    fields = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(gemma3n / file, tmp_path / file)
    assert outputs(tmp_path, PROMPTS) == outputs(gemma3n, PROMPTS)
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(PenstockError, match="images: are not supported by this model"):
        LLM(tmp_path, **OPTIONS).chat([{"role": "user", "content": image}])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified"])
def test_language_model_of_multimodal_checkpoint_runs_and_images_are_refused(name: str, tmp_path: Path) -> None:
    """The text is the prompt of the whole model of transformers, with a vision tower."""
    shared = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = shared | {"head_dim": 16, "intermediate_size": 32, "position_embedding_size": 16}
    fields: dict[str, Any] = dict(FIELDS)
    if name == "Gemma4Unified":
        vision = {"mm_embed_dim": 32, "mm_posemb_size": 16}
        fields = {each: value for each, value in FIELDS.items() if "per_layer_input" not in each}
        fields["num_kv_shared_layers"] = 0
    text = Gemma4TextConfig if name == "Gemma4" else Gemma4UnifiedTextConfig
    config_class, model_class = (
        getattr(transformers, f"{name}{end}") for end in ("Config", "ForConditionalGeneration")
    )
    config = config_class(text_config=text(**fields).to_dict(), vision_config=vision, audio_config=None)
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / file, tmp_path / file)
    llm = LLM(tmp_path, **OPTIONS)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        token_ids = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == token_ids
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(PenstockError, match="images: are not supported by this model"):
        llm.chat([{"role": "user", "content": image}])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["Gemma4", "Gemma4 with experts", "Gemma3n"])
def test_adapter_matches_peft(name: str, tmp_path: Path) -> None:
    """The adapter changes all linear modules, except routers, coefficients of streams, and the head."""
    folder, others = tmp_path, re.compile("router|_coefs|lm_head")
    if name == "Gemma4 with experts":
        model = draw_with_experts(4, folder)
    else:
        save_dense(name, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = model.named_modules()
    modules = [each for each, module in named if isinstance(module, torch.nn.Linear) and not others.search(each)]
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=modules, init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    llm = LLM(folder, **OPTIONS, enable_lora=True, max_loras=1)
    request = LoRARequest("a", 1, str(tmp_path / "adapter"))
    found = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, lora_request=request)
    for prompt, output in zip(PROMPTS[:4], found, strict=True):
        token_ids = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = adapted(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == token_ids


@pytest.mark.slow
def test_bfloat16_error_is_near_that_of_transformers(tmp_path: Path) -> None:
    ours, library = bfloat16_errors(tmp_path, draw_with_experts(1, tmp_path))
    assert ours <= 1.2 * library


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bitsandbytes nf4", "nvfp4 of Model Optimizer"])
@pytest.mark.parametrize("name", ["Gemma4", "Gemma3n"])
def test_quantized_checkpoint_matches_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """All linear modules of the layers are quantized whose rows consist of whole groups."""
    save_dense(name, tmp_path)

    def is_quantized(tensor: str, outputs: int, inputs: int) -> bool:
        return ".layers." in tensor and "per_layer" not in tensor and inputs % 32 == 0 and outputs * inputs % 64 == 0

    check(tmp_path, quantize_checkpoint(tmp_path, QUANTIZED[kind], is_quantized), error_ratio=4.0)
