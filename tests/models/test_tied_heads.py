"""Tied embeddings: as in transformers, a stored LM head that differs from the embedding is used for any value of
``tie_word_embeddings``. The memory plan counts such a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import state_families
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.stored_tensors import stored_head
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import model_size_of

TIED = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Cohere",
    "Granite",
    "SmolLM3",
    "Starcoder2",
    "Ernie4_5",
)
SAMPLE = ("Llama", "Gemma2", "Cohere", "Starcoder2", "Mamba")
PROMPT = list(range(2, 60))
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 8, "weight_cache_dir": "none"}
OPTIONS |= {"max_model_len": 64}
WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING, MAMBA_EMBEDDING, HEAD = "model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight"


def save_tied(family: str, folder: Path) -> None:
    """Save a checkpoint with tied embeddings."""
    from random import Random

    config = (families.FAMILIES | families.WITH_EXPERTS | state_families.FAMILIES)[family](Random(family))
    config.tie_word_embeddings = True
    save(config, folder)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def with_head(tensors: dict[str, torch.Tensor], same: bool = False) -> dict[str, torch.Tensor]:
    embedding = tensors[EMBEDDING if EMBEDDING in tensors else MAMBA_EMBEDDING]
    torch.manual_seed(1)
    return tensors | {HEAD: embedding.clone() if same else torch.randn_like(embedding) * 0.2}


def logprobs(folder: Path, **options: Any) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = LLM(folder, **OPTIONS | options).generate([PROMPT], params, use_tqdm=False)
    return [found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()]


def library_logprobs(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        table = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    found: list[float] = table[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    return found


def check_different_head(family: str, folder: Path) -> None:
    save_tied(family, folder)
    before = model_size_of(read_config_json(folder))
    rewrite(folder, with_head)
    assert logprobs(folder) == pytest.approx(library_logprobs(folder), abs=2e-4)
    size = model_size_of(read_config_json(folder))
    assert size.embedding_weights == 2 * before.embedding_weights
    assert weight_bytes(size) > weight_bytes(before)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", SAMPLE)
def test_different_head_is_used_despite_tie_word_embeddings(family: str, tmp_path: Path) -> None:
    check_different_head(family, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("family", sorted({*families.FAMILIES, *families.WITH_EXPERTS} - {*SAMPLE}))
def test_different_head_is_used_in_every_family(family: str, tmp_path: Path) -> None:
    check_different_head(family, tmp_path)


def test_embedding_stored_twice_is_tied(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    rewrite(tmp_path, lambda tensors: with_head(tensors, same=True))
    assert read_config(tmp_path).tie_word_embeddings
    assert logprobs(tmp_path) == pytest.approx(library_logprobs(tmp_path), abs=2e-4)


def test_different_head_in_another_shard_is_used(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    tensors = with_head(load_file(tmp_path / WEIGHTS))
    (tmp_path / WEIGHTS).unlink()
    parts = {"model-00001-of-00002.safetensors": [HEAD], "model-00002-of-00002.safetensors": [*tensors.keys() - {HEAD}]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file, {"format": "pt"})
    places = {name: file for file, names in parts.items() for name in names}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert not read_config(tmp_path).tie_word_embeddings
    assert logprobs(tmp_path) == pytest.approx(library_logprobs(tmp_path), abs=2e-4)


def test_different_head_in_a_pytorch_file_is_used(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    torch.save(with_head(load_file(tmp_path / WEIGHTS)), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    assert logprobs(tmp_path) == pytest.approx(library_logprobs(tmp_path), abs=2e-4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Qwen3Config(**SMALL, head_dim=32)])
def test_model_without_flag_and_head_is_tied(config: PreTrainedConfig, tmp_path: Path) -> None:
    save(config, tmp_path)
    raw = json.loads((tmp_path / CONFIG).read_text())
    rewrite(tmp_path, lambda tensors: {name: each for name, each in tensors.items() if name != HEAD})
    (tmp_path / CONFIG).write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    expected = library_logprobs(tmp_path)
    del raw["tie_word_embeddings"]
    (tmp_path / CONFIG).write_text(json.dumps(raw))
    assert logprobs(tmp_path) == pytest.approx(expected, abs=2e-4)


def test_missing_head_of_untied_model_is_refused(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, tie_word_embeddings=False), tmp_path)
    rewrite(tmp_path, lambda tensors: {name: each for name, each in tensors.items() if name != HEAD})
    with pytest.raises(PenstockError, match=r"no tensor lm_head\.weight"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("file", [WEIGHTS, "pytorch_model.bin"])
def test_stored_head_alone_is_the_embedding_of_a_tied_model(file: str, tmp_path: Path) -> None:
    """``safetensors.torch.save_model`` writes tied tensors under one of their names."""
    save(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    rewrite(tmp_path, lambda tensors: {HEAD if name == EMBEDDING else name: each for name, each in tensors.items()})
    if file != WEIGHTS:
        torch.save(load_file(tmp_path / WEIGHTS), tmp_path / file)
        (tmp_path / WEIGHTS).unlink()
    assert logprobs(tmp_path) == pytest.approx(library_logprobs(tmp_path), abs=2e-4)


def test_unrelated_safetensors_file_does_not_untie_the_embedding(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    save_file({HEAD: torch.randn(load_file(tmp_path / WEIGHTS)[EMBEDDING].shape)}, tmp_path / "value_head.safetensors")
    assert read_config(tmp_path).tie_word_embeddings
    assert logprobs(tmp_path) == pytest.approx(library_logprobs(tmp_path), abs=2e-4)


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, 2 * 2**20 + 12_345])
def test_head_with_one_different_byte_is_different(at: int, tmp_path: Path) -> None:
    values = torch.arange(2**19 + 2**14, dtype=torch.int32).view(64, -1)
    head = values.clone()
    head.view(-1).view(torch.uint8)[at] ^= 1
    save_file({EMBEDDING: values.view(torch.float32), HEAD: head.view(torch.float32)}, tmp_path / WEIGHTS)
    assert stored_head(tmp_path) == "other"
    save_file({EMBEDDING: values.view(torch.float32), HEAD: values.clone().view(torch.float32)}, tmp_path / WEIGHTS)
    assert stored_head(tmp_path) == "same"


def test_different_head_is_counted_with_model_impl_auto(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300, n_positions=128, tie_word_embeddings=True)
    model = save(config, tmp_path)
    assert model.config.tie_word_embeddings
    before = model_size_of(read_config(tmp_path, "auto").raw)
    embedding = load_file(tmp_path / WEIGHTS)["transformer.wte.weight"]
    rewrite(tmp_path, lambda tensors: tensors | {HEAD: torch.randn_like(embedding) * 0.2})
    size = model_size_of(read_config(tmp_path, "auto").raw)
    assert size.embedding_weights == 2 * before.embedding_weights
    assert logprobs(tmp_path, model_impl="auto") == pytest.approx(library_logprobs(tmp_path), abs=2e-4)
