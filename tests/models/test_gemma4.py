"""Gemma 4: heads that differ between layers, shared keys and values, inputs of each layer, experts next to the MLP."""

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
from safetensors.torch import load_file
from test_families import GREEDY, OPTIONS, PROMPTS, bfloat16_errors, check
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Gemma4UnifiedTextConfig, PreTrainedModel

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
REPEATED = [prompt[:20] * 4 for prompt in PROMPTS if len(prompt) >= 20]
"""Prompts with repetitions, for drafts of n-grams."""
NGRAMS = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    save(Gemma4TextConfig(**FIELDS), folder)
    return folder


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


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_bits_do_not_depend_on_drafts_ranks_and_stages(experts: bool, folder: Path, tmp_path: Path) -> None:
    if experts:
        draw_with_experts(3, folder := tmp_path)
    expected = outputs(folder, REPEATED, max_num_batched_tokens=512, num_gpu_blocks_override=400)
    itself = {"model": str(folder), "num_speculative_tokens": 2, "adaptive": False}
    for options in (
        {"tensor_parallel_size": 2, "enable_expert_parallel": experts},
        {"pipeline_parallel_size": 2, "speculative_config": NGRAMS},
        {"tensor_parallel_size": 2} if experts else {"speculative_config": json.dumps(itself)},
    ):
        assert outputs(folder, REPEATED, **options) == expected, options


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
def test_engine_folder_has_the_same_bits(tmp_path: Path) -> None:
    draw_with_experts(3, folder := tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2, "weight_cache_dir": "none"}
    build_engine(EngineOptions(model=str(folder), **options), tmp_path / "engine", workers=1, recorded={})
    assert outputs(tmp_path / "engine", REPEATED, tensor_parallel_size=2) == outputs(folder, REPEATED)


def test_planned_sizes_equal_sizes_of_loaded_model(folder: Path, tmp_path: Path) -> None:
    draw_with_experts(3, tmp_path)
    for each in (folder, tmp_path):
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
    fields: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(PenstockError, match=re.escape(message)):
        read_config(tmp_path)


def test_quantize_refuses_layers_with_different_heads(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="has layers with different heads, which cannot be calibrated"):
        quantize(folder, tmp_path / "out", QuantizeOptions(method="gptq"), threads=1, progress=False)


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
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_adapter_matches_peft(experts: bool, folder: Path, tmp_path: Path) -> None:
    """The adapter changes all linear modules of the layers, except the router."""
    if experts:
        model, folder = draw_with_experts(4, tmp_path), tmp_path
    else:
        model = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    in_layers = re.compile(r"layers\..*\.(\w+)$")
    modules = {
        found[1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (found := in_layers.search(name)) and "router" not in name
    }
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=sorted(modules), init_lora_weights=False)
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
