"""GGUF files, written by llama.cpp's library: types of tensors, weights, tokenizers, chat templates and configs."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import regex
import sentencepiece
import torch
from checkpoints import SMALL, save
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import QUANTIZABLE, add_tokenizer, random_blocks, write_gguf
from hypothesis import given, settings
from safetensors.torch import save_file
from serving import Servers, run_in_process
from test_hub import NEW, Client, Hub
from test_tokenizer_files import LINES, TEXT
from tokenizers import models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock import LLM, demo
from penstock.checkpoint.checkpoint_digest import checkpoint_digest
from penstock.checkpoint.gguf_file import TYPES, GGUFFile
from penstock.cli.main import main
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.gguf_folder import checkpoint_folder
from penstock.frontend.hub import resolve
from penstock.models.weights import GGUFCheckpoint
from penstock.quant.gguf import READERS, read_blocks
from penstock.text import Tokenizer
from penstock.text.from_gguf import CASED_LETTERS, PRE_TOKENIZERS
from penstock.text.vocabulary import byte_alphabet

QUANTIZED = sorted(READERS)
LARGER = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
WORDY = SMALL | {"vocab_size": 3584}  # transformers takes the size from the tokenizer
ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama, llama3 rope": LlamaConfig(**LARGER, rope_parameters=LLAMA3),
    "llama, biases, tied": LlamaConfig(**LARGER, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**LARGER, sliding_window=24, head_dim=32),
    "qwen2, yarn rope": Qwen2Config(**LARGER, rope_parameters=ROPE | {"rope_type": "yarn"}),
    "qwen3, tied": Qwen3Config(**LARGER, head_dim=32, tie_word_embeddings=True),
    "qwen3moe": Qwen3MoeConfig(
        **LARGER, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    ),
    "gemma3, norms + 1, windows": Gemma3TextConfig(**LARGER, head_dim=32, query_pre_attn_scalar=32, sliding_window=24),
    "deepseek2, latent attention": DeepseekV3Config(
        **LARGER | {"num_key_value_heads": 4, "num_hidden_layers": 2},
        **{"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 32, "v_head_dim": 64},
        **{"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
        **{"moe_intermediate_size": 256, "n_shared_experts": 1, "routed_scaling_factor": 1.7},
    ),
}
PROMPT = random.Random(0).choices(range(2, 300), k=100)
UNIGRAM = ("unigram", "nmt_nfkc", True)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in Q8_0."""
    file = tmp_path_factory.mktemp("demo") / "demo-Q8_0.gguf"
    write_gguf(demo.CHAT, file)
    return file


@pytest.mark.parametrize("kind", QUANTIZED)
def test_dequantized_tensors_match_llama_cpp(kind: str) -> None:
    """Equal bits in float32, except Q4_1 and Q4_K: their integers are -8 to 7 in Penstock and 0 to 15 in llama.cpp, so
    Penstock's offsets are rounded once more."""
    number = GGMLQuantizationType[kind]
    rows = random_blocks(kind, 70, 768, np.random.default_rng(0))
    expected = torch.from_numpy(gguf.quants.dequantize(rows, number))
    weight = read_blocks(TYPES[number], torch.from_numpy(rows))
    assert weight.values.dtype == torch.int8 and weight.format == TYPES[number].format
    if weight.format.bits == 4:
        assert weight.values.min() >= -8 and weight.values.max() <= 7
    limit = 2**-23 * expected.abs().max() if kind in ("Q4_1", "Q4_K") else 0
    assert (weight.dequantize() - expected).abs().max() <= limit


def test_block_sizes_and_names_equal_llama_cpp() -> None:
    for number, kind in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.block, kind.size)
        assert GGMLQuantizationType(number).name == kind.name


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_model_of_mixed_types_matches_transformers(name: str, tmp_path: Path) -> None:
    """transformers runs the weights as dequantized by llama.cpp's library. Compares log probabilities and greedy tokens
    in float32, and the error in bfloat16, where Penstock's kernels multiply integers."""
    save(CONFIGS[name], tmp_path)
    kinds = cycle([*QUANTIZED, "F32", "F16", "BF16"])
    stored = write_gguf(tmp_path, tmp_path / "small.gguf", lambda name: next(kinds))
    save_file(
        {name: torch.from_numpy(weight).contiguous() for name, weight in stored.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager")
    options: Any = {"block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    exact, rough = (
        LLM(tmp_path / "small.gguf", dtype=dtype, **options).generate([PROMPT], params, use_tqdm=False)[0]
        for dtype in ("float32", "bfloat16")
    )
    generated = exact.outputs[0].token_ids
    with torch.inference_mode():
        table = model(torch.tensor([PROMPT + generated])).logits[0].log_softmax(-1)
    assert table[len(PROMPT) - 1 : -1].argmax(-1).tolist() == generated
    reported = [*(exact.prompt_logprobs or [])[1:], *(exact.outputs[0].logprobs or [])]
    for row, token, position in zip(table, (PROMPT + generated)[1:], reported, strict=False):
        assert position is not None
        assert position[token].logprob == pytest.approx(float(row[token]), abs=3e-4 if "latent" in name else 1e-4)
    with torch.inference_mode():
        theirs = model.bfloat16()(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    errors = torch.zeros(2)
    for row, their, token, position in zip(table, theirs, PROMPT[1:], (rough.prompt_logprobs or [])[1:], strict=False):
        assert position is not None
        errors += torch.stack((position[token].logprob - row[token], their[token] - row[token])).abs()
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [LlamaConfig(**WORDY), Qwen2Config(**WORDY), Qwen3Config(**WORDY)])
def test_config_and_weights_are_read_as_by_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    """transformers has an independent implementation of GGUF."""
    save(config, tmp_path)
    write_gguf(tmp_path, tmp_path / "small.gguf", lambda name: "Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    folder = checkpoint_folder(tmp_path / "small.gguf")
    ours = json.loads((folder / "config.json").read_text())
    assert ours["architectures"] == type(theirs).__name__.split()
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"):
        assert ours[field] == getattr(theirs.config, field), field
    assert ours["rms_norm_eps"] == pytest.approx(theirs.config.rms_norm_eps)
    assert ours["rope_parameters"]["rope_theta"] == theirs.config.rope_parameters["rope_theta"]
    weights = GGUFCheckpoint(folder, [tmp_path / "small.gguf"], ours["head_dim"])
    for name, expected in theirs.state_dict().items():
        if weights.format_of(name.removesuffix(".weight")).bits:
            outputs, inputs = expected.shape
            read = weights.read_quantized(name.removesuffix(".weight"), outputs, inputs, (0, outputs)).dequantize()
        else:
            read = weights.read(name, *expected.shape).float()
        assert torch.equal(read, expected), name


def test_rows_read_by_a_rank_equal_rows_of_the_tensor(tmp_path: Path) -> None:
    save(CONFIGS["llama, biases, tied"], tmp_path)
    write_gguf(tmp_path, tmp_path / "small.gguf", lambda name: "Q4_K" if "attn_q" in name else "F16")
    weights = GGUFCheckpoint(checkpoint_folder(tmp_path / "small.gguf"), [tmp_path / "small.gguf"], 64)
    prefix = "model.layers.1.self_attn"
    whole = weights.read_quantized(f"{prefix}.q_proj", 256, 256, (0, 256)).dequantize()
    assert torch.equal(weights.read_quantized(f"{prefix}.q_proj", 256, 256, (70, 200)).dequantize(), whole[70:200])
    for name, shape in ((f"{prefix}.k_proj.weight", (128, 256)), (f"{prefix}.k_proj.bias", (128,))):
        assert torch.equal(weights.read(name, *shape, rows=(30, 99)), weights.read(name, *shape)[30:99])


@pytest.mark.slow
def test_demo_model_in_q8_0_answers_correctly(demo_file: Path) -> None:
    llm = LLM(demo_file)
    params = SamplingParams(temperature=0, max_tokens=40)
    (answer,) = llm.chat(QUESTION, params, use_tqdm=False)
    assert answer.outputs[0].text == "The capital of France is Paris."
    assert answer.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_two_ranks_generate_the_same_as_one(demo_file: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    outputs = [
        LLM(demo_file, num_gpu_blocks_override=40, **ranks).chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
        for ranks in ({}, {"tensor_parallel_size": 2})
    ]
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].logprobs == outputs[1].logprobs


@pytest.mark.slow
def test_server_serves_a_gguf_file(demo_file: Path, servers: Servers) -> None:
    server = servers.get("--model", str(demo_file), "--num-gpu-blocks-override", "400")
    body = {"model": str(demo_file), "messages": QUESTION, "temperature": 0}
    reply = httpx.post(f"{server.url}/chat/completions", json=body, timeout=60).json()
    assert reply["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert reply["model"] == str(demo_file)


@pytest.mark.slow
def test_drafts_of_a_gguf_draft_model_are_accepted(demo_file: Path, tmp_path: Path) -> None:
    write_gguf(demo.DRAFT, tmp_path / "draft.gguf", lambda name: "F16")
    params = SamplingParams(temperature=0, max_tokens=40)
    llm = LLM(demo_file, speculative_config={"model": str(tmp_path / "draft.gguf"), "adaptive": False})
    assert llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text == "The capital of France is Paris."
    assert llm.engine.speculation and llm.engine.speculation.stats.accepted_tokens


def test_folder_with_one_gguf_file_resolves_to_the_file(demo_file: Path, tmp_path: Path) -> None:
    shutil.copy(demo_file, tmp_path / "demo.gguf")
    (tmp_path / "mmproj-demo.gguf").touch()
    (tmp_path / "config.json").touch()  # some repositories on the hub have this file, but no tokenizer
    assert resolve(tmp_path) == resolve(tmp_path / "demo.gguf") != resolve(demo_file)
    shutil.copy(demo_file, tmp_path / "other.gguf")
    with pytest.raises(PenstockError, match=r"has several models: name one of demo\.gguf, other\.gguf"):
        resolve(tmp_path)


def test_link_gives_a_file_without_suffix_a_name(demo_file: Path, tmp_path: Path) -> None:
    """As for the files that Ollama stores (docs/cookbook/from_ollama.md)."""
    blob = shutil.copy(demo_file, tmp_path / "sha256-0")
    with pytest.raises(PenstockError):
        resolve(blob)
    (tmp_path / "demo.gguf").symlink_to(blob)
    llm = LLM(tmp_path / "demo.gguf")
    (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert answer.outputs[0].text == "The capital of France is Paris."


def test_plan_memory_reads_a_gguf_file(demo_file: Path) -> None:
    result = run_in_process(main, "plan", "memory", "--model", str(demo_file), "--json", "--gpu-memory", "1")
    planned = json.loads(result.stdout)
    assert planned["architecture"] == "Qwen3ForCausalLM", result.stderr
    weights = sum(tensor.size for tensor in GGUFFile(demo_file).tensors.values())
    assert weights < planned["weight_bytes"] < 1.1 * weights  # scales have 32 bits in Penstock, and 16 in the file


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    model = save(Qwen3Config(**SMALL, head_dim=32), tmp_path)
    write_gguf(tmp_path, tmp_path / "small.gguf", lambda name: "F32", parts=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    options: Any = {"dtype": "float32", "num_gpu_blocks_override": 20, "weight_cache_dir": "none"}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = LLM(parts[1], **options).generate([PROMPT[:9]], params, use_tqdm=False)
    expected = model.generate(torch.tensor([PROMPT[:9]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == expected[0, 9:].tolist()
    parts[-1].unlink()
    with pytest.raises(PenstockError, match=f"lacks {parts[-1].name}, a part of this model"):
        resolve(parts[0])


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_rope_scale_without_type_is_linear(name: str, tmp_path: Path) -> None:
    """As in llama.cpp. ``rope.scale_linear`` is the name used before November 2023."""

    def tokenizer(writer: GGUFWriter) -> None:
        add_tokenizer(writer, demo.CHAT)
        writer.add_float32(f"{writer.arch}.{name}", 4.0)

    write_gguf(demo.CHAT, tmp_path / "long.gguf", tokenizer=tokenizer)
    rope = json.loads((resolve(tmp_path / "long.gguf") / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}


def test_file_merged_from_parts_is_read(tmp_path: Path) -> None:
    """``gguf-split --merge`` leaves the numbers of parts in the file, set to 0."""

    def tokenizer(writer: GGUFWriter) -> None:
        add_tokenizer(writer, demo.CHAT)
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 0)

    write_gguf(demo.CHAT, tmp_path / "merged.gguf", tokenizer=tokenizer)
    assert (resolve(tmp_path / "merged.gguf") / "config.json").exists()


def test_digest_changes_with_the_weights(demo_file: Path, tmp_path: Path) -> None:
    copy, changed = tmp_path / "copy.gguf", tmp_path / "changed.gguf"
    for file in (copy, changed):
        shutil.copy(demo_file, file)
    tensor = GGUFFile(changed).tensors["blk.3.ffn_up.weight"]
    content = bytearray(changed.read_bytes())
    content[tensor.offset : tensor.offset + tensor.size] = bytes(tensor.size)
    changed.write_bytes(content)
    versions = [checkpoint_digest(resolve(file)) for file in (demo_file, copy, changed)]
    assert versions[0] == versions[1] != versions[2]


@pytest.mark.slow
def test_replaced_file_is_not_read_from_the_weight_cache(tmp_path: Path) -> None:
    """A second start with the same file uses the cache."""
    save(Qwen3Config(**SMALL, head_dim=32), tmp_path)
    file, cache = tmp_path / "small.gguf", tmp_path / "cache"
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)

    def score() -> Any:
        llm = LLM(file, num_gpu_blocks_override=20, weight_cache_dir=str(cache))
        return llm.generate([PROMPT[:9]], params, use_tqdm=False)[0].outputs[0].logprobs

    write_gguf(tmp_path, file, lambda name: "Q8_0")
    assert score() == score()
    first = score()
    write_gguf(tmp_path, file, lambda name: "Q4_0")
    assert score() != first


@pytest.mark.slow
def test_update_weights_reads_a_gguf_file(demo_file: Path) -> None:
    llm = LLM(num_gpu_blocks_override=100)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
    before, version = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0], llm.engine.info.weights_version
    llm.update_weights(demo_file)
    after = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert before.text == after.text == "The capital of France is Paris."
    assert before.logprobs != after.logprobs and llm.engine.info.weights_version != version


# --- Tokenizers -------------------------------------------------------------------------------------------------------

CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD_END = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{WORD_END}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{WORD_END}|\p{{N}}{{1,3}}"
    + REST.replace("[\\r\\n]*", "[\\r\\n/]*")
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
SPLITS = {
    "llama-bpe": [CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST],
    "deepseek-r1-qwen": [CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST],
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
        + REST.replace("[\\r\\n]*", "[\\r\\n/]*")
    ],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "smaug-bpe": [CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST],
    "gpt-4o": [GPT4O],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "deepseek-llm": [
        r"[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "kimi-k2": [
        r"\p{Han}+|"
        + GPT4O.replace("/", "")
        .replace(UPPER, rf"(?:(?!\p{{Han}}){UPPER})")
        .replace(LOWER, rf"(?:(?!\p{{Han}}){LOWER})")
    ],
    "seed-coder": [CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "bloom": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
}
"""Regular expressions with which llama.cpp splits texts, one after the other, by pre-tokenizer."""


def split(text: str, patterns: list[str]) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def tokenizer_file(folder: Path, add: Callable[[GGUFWriter], None]) -> Path:
    """A GGUF file of a tiny model, with the tokenizer that ``add`` writes."""
    save(Qwen3Config(**SMALL | {"num_hidden_layers": 1}), folder)
    write_gguf(folder, folder / "tiny.gguf", tokenizer=add)
    return folder / "tiny.gguf"


@pytest.fixture(scope="module", params=SPLITS)
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    def add(writer: GGUFWriter) -> None:
        add_tokenizer(writer, demo.CHAT, request.param)

    return request.param, Tokenizer(checkpoint_folder(tokenizer_file(tmp_path_factory.mktemp("bpe"), add)))


@pytest.mark.slow_after(1)
@settings(max_examples=25, deadline=None)
@given(text=TEXT)
def test_byte_level_bpe_splits_texts_as_llama_cpp(byte_level: tuple[str, Tokenizer], text: str) -> None:
    name, ours = byte_level
    text = text.replace("\u017f", "s").replace("<", "(")  # a long s matches s if case is ignored; no special tokens
    stored_json = json.loads((demo.CHAT / "tokenizer.json").read_text())["model"]
    merges = [tuple(pair) for pair in stored_json["merges"]]
    model = models.BPE(stored_json["vocab"], merges, ignore_merges=PRE_TOKENIZERS[name].ignore_merges)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    pieces = ["".join(letters[byte] for byte in piece.encode()) for piece in split(text, SPLITS[name])]
    assert ours.encode(text) == [token.id for piece in pieces for token in model.tokenize(piece)]
    assert ours.decode(ours.encode(text)) == text


def test_every_pre_tokenizer_is_tested() -> None:
    tested = {PRE_TOKENIZERS[name].patterns for name in SPLITS}
    assert tested == {pre.patterns for pre in PRE_TOKENIZERS.values()}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen2Tokenizer, Tokenizer]:
    stored_json = json.loads((demo.CHAT / "tokenizer.json").read_text())
    theirs = Qwen2Tokenizer(
        vocab=stored_json["model"]["vocab"], merges=[tuple(pair) for pair in stored_json["model"]["merges"]]
    )
    for token in stored_json["added_tokens"]:
        theirs.add_tokens([token["content"]], special_tokens=token["special"])
    file = tokenizer_file(tmp_path_factory.mktemp("qwen"), lambda writer: add_tokenizer(writer, demo.CHAT, "qwen2"))
    return theirs, Tokenizer(checkpoint_folder(file))


@settings(max_examples=50, deadline=None)
@given(text=TEXT)
def test_tokens_of_qwen2_match_transformers(qwen: tuple[Qwen2Tokenizer, Tokenizer], text: str) -> None:
    theirs, ours = qwen
    for each in (text, f"<|im_start|>user\n{text}<|im_end|>{text}"):
        assert ours.encode(each) == theirs.encode(each)
    assert ours.special["eos_token"] == "<|im_end|>"


def test_tokenizer_files_of_demo_are_restored(demo_file: Path) -> None:
    folder = resolve(demo_file)
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads((demo.CHAT / "tokenizer.json").read_text())
    assert (folder / "chat_template.jinja").read_text() == (demo.CHAT / "chat_template.jinja").read_text()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [3577, 3575]


def test_named_chat_template_is_used_with_tools(tmp_path: Path) -> None:
    def tokenizer(writer: GGUFWriter) -> None:
        add_tokenizer(writer, demo.CHAT, "qwen2")
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template([{"name": name, "template": name} for name in ("default", "tool_use")])

    ours = Tokenizer(checkpoint_folder(tokenizer_file(tmp_path, tokenizer)))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert [ours.render(QUESTION), ours.render(QUESTION, tools=tools)] == ["default", "tool_use"]


def test_im_end_marked_as_text_is_a_special_token(tmp_path: Path) -> None:
    """As text, ``<|im_end|>`` would not be encoded as one token, and would not end the answer."""

    def tokenizer(writer: GGUFWriter) -> None:
        add_tokenizer(writer, demo.CHAT, "qwen2")
        types = writer.kv_data[0]["tokenizer.ggml.token_type"].value
        types[3577] = gguf.TokenType.NORMAL

    write_gguf(demo.CHAT, tmp_path / "text.gguf", tokenizer=tokenizer)
    folder = resolve(tmp_path / "text.gguf")
    assert Tokenizer(folder).encode("<|im_end|>") == [3577]
    assert 3577 in json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.fixture(scope="module", params=[("bpe", "identity", True), ("bpe", "identity", False), UNIGRAM])
def pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """SentencePiece models: BPE with and without a space before the text, unigram with normalization."""
    folder = tmp_path_factory.mktemp("pieces")
    kind, rule, prefixed = request.param
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=300,
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
        add_dummy_prefix=prefixed,
        user_defined_symbols=["<|user|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    model = json.loads(Tokenizer(folder).to_json())
    file = tokenizer_file(folder, lambda writer: add_pieces(writer, theirs, model))
    return theirs, Tokenizer(checkpoint_folder(file))


def add_pieces(writer: GGUFWriter, theirs: sentencepiece.SentencePieceProcessor, model: dict[str, Any]) -> None:
    """Write a SentencePiece model as llama.cpp's converter does.

    Args:
        model: the same model in the format of ``tokenizer.json``.
    """
    steps = model["normalizer"]["normalizers"]

    def kind(token_id: int) -> gguf.TokenType:
        if theirs.is_unknown(token_id):
            return gguf.TokenType.UNKNOWN
        if theirs.is_control(token_id):
            return gguf.TokenType.CONTROL
        if theirs.is_byte(token_id):
            return gguf.TokenType.BYTE
        return gguf.TokenType.USER_DEFINED if token_id == theirs.piece_to_id("<|user|>") else gguf.TokenType.NORMAL

    ids = range(theirs.vocab_size())
    writer.add_tokenizer_model("llama" if model["model"]["type"] == "BPE" else "t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([theirs.id_to_piece(token_id) for token_id in ids])
    writer.add_token_scores([theirs.get_score(token_id) for token_id in ids])
    writer.add_token_types([kind(token_id) for token_id in ids])
    writer.add_bos_token_id(theirs.bos_id())
    writer.add_eos_token_id(theirs.eos_id())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(any(step["type"] == "Prepend" for step in steps))
    writer.add_remove_extra_whitespaces(any("Regex" in step.get("pattern", {}) for step in steps))
    for step in steps:
        if step["type"] == "Precompiled":
            writer.add_precompiled_charsmap(base64.b64decode(step["precompiled_charsmap"]))


@settings(max_examples=50, deadline=None)
@given(text=TEXT)
def test_sentencepiece_tokens_match_its_library(
    pieces: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str
) -> None:
    theirs, ours = pieces
    text = text.replace("\u2581", "_")
    if re.search("</?s>|<unk>", text):
        return
    assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
    assert ours.decode(ours.encode(text)).lstrip(" ") == theirs.decode(theirs.encode(text)).lstrip(" ")


def test_long_piece_of_a_bpe_model_is_refused(tmp_path: Path) -> None:
    """The number of merges would grow with the length of the piece."""

    def tokenizer(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a", "a" * 600])
        writer.add_token_scores([0.0, -1.0, -2.0])
        writer.add_token_types([gguf.TokenType.UNKNOWN, gguf.TokenType.NORMAL, gguf.TokenType.NORMAL])

    with pytest.raises(PenstockError, match="a piece of 600 characters; the limit is 512"):
        resolve(tokenizer_file(tmp_path, tokenizer))


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    def other(writer: GGUFWriter) -> None:
        add_tokenizer(writer, demo.CHAT, "unknown")

    with pytest.raises(PenstockError, match=r"has pre-tokenizer 'unknown'; supported: llama-bpe, "):
        resolve(tokenizer_file(tmp_path, other))


# --- Broken files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    save(LlamaConfig(**SMALL | {"num_hidden_layers": 1}, rope_parameters=LLAMA3), folder)
    kinds = cycle(QUANTIZABLE)
    write_gguf(folder, folder / "tiny.gguf", lambda name: "Q8_0" if "ffn_down" in name else next(kinds))
    return (folder / "tiny.gguf").read_bytes()


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return change


def key(name: str) -> bytes:
    return u64(len(name)) + name.encode()


def entry(name: str, *rest: int) -> bytes:
    """Start of a tensor's entry in the header: name and dimensions."""
    return key(name) + u32(len(rest)) + b"".join(map(u64, rest))


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda content: b"", "cannot be read"),
    "something else": (lambda content: b"PK" + content[2:], "does not begin with the bytes GGUF"),
    "cut in the header": (lambda content: content[:5000], "cut short"),
    "without its end": (lambda content: content[:-100], "does not lie within the file"),
    "version 1": (replaced(b"GGUF\3", b"GGUF\1"), "has GGUF version 1; versions 2 and 3 are supported"),
    "big-endian": (replaced(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"), "is big-endian"),
    "many tensors": (lambda content: content[:8] + u64(2**63) + content[16:], "9223372036854775808 tensors"),
    "many values": (lambda content: content[:16] + u64(2**63) + content[24:], "9223372036854775808 values"),
    "a long key": (lambda content: content[:24] + u64(2**62) + content[32:], "a string of 4611686018427387904 bytes"),
    "a key twice": (replaced(b"llama.block_count", b"llama.head_count_"), "lacks llama.block_count"),
    "many tokens": (
        lambda content: re.sub(
            rb"(tokenizer.ggml.tokens.{8}).{8}", lambda m: m[1] + u64(2**60), content, flags=re.DOTALL
        ),
        "an array in its header has 1152921504606846976 strings",
    ),
    "a value of no type": (
        replaced(key("llama.block_count") + u32(4), key("llama.block_count") + u32(99)),
        "a value of type 99",
    ),
    "a string for a number": (
        lambda content: content.replace(
            key("llama.block_count") + u32(4) + u32(1), key("llama.block_count") + u32(8) + u64(4) + b"four"
        ),
        "llama.block_count is 'four'; it must be of type int",
    ),
    "a thousand layers": (
        replaced(key("llama.block_count") + u32(4) + u32(1), key("llama.block_count") + u32(4) + u32(1000)),
        "has 1000 layers, but only",
    ),
    "no context": (
        replaced(key("llama.context_length") + u32(4) + u32(256), key("llama.context_length") + u32(4) + u32(0)),
        "llama.context_length is 0",
    ),
    "another architecture": (
        replaced(u64(5) + b"llama", u64(5) + b"plamo"),
        "has architecture 'plamo', which is not supported; supported: llama, qwen2, qwen3",
    ),
    "huge dimensions": (
        replaced(entry("blk.0.attn_q.weight", 64, 64), entry("blk.0.attn_q.weight", 2**62, 2**62)),
        "'blk.0.attn_q.weight'",
    ),
    "no dimension": (
        replaced(entry("blk.0.attn_q.weight", 64, 64), entry("blk.0.attn_q.weight", 64, 0)),
        "has dimensions [64, 0]",
    ),
    "a row of half a block": (
        replaced(entry("blk.0.ffn_down.weight", 96, 64), entry("blk.0.ffn_down.weight", 48, 128)),
        "has dimensions [48, 128]",
    ),
    "another shape": (
        replaced(entry("blk.0.ffn_down.weight", 96, 64), entry("blk.0.ffn_down.weight", 192, 32)),
        "has shape (32, 192); config.json requires (64, 96)",
    ),
    "a type that is not read": (
        replaced(entry("output_norm.weight", 64) + u32(0), entry("output_norm.weight", 64) + u32(16)),
        "tensor 'output_norm.weight' has type IQ2_XXS, which is not supported; supported: BF16, F16, F32,",
    ),
    "a number of another model": (
        replaced(key("llama.feed_forward_length"), key("llama.attn_logit_softcapping")),
        "has the metadata key attn_logit_softcapping, which is not supported for architecture llama",
    ),
    "an adapter": (
        replaced(key("llama.block_count") + u32(4) + u32(1), key("general.type") + u32(8) + key("adapter")),
        "has general.type 'adapter'; name a file with a model",
    ),
    "a tensor twice": (replaced(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "'blk.0.attn_k.weight' twice"),
    "another tensor": (
        replaced(b"rope_freqs.weight", b"rope_other.weight"),
        "has tensor 'rope_other.weight', which is not supported for architecture llama",
    ),
    "a missing tensor": (replaced(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "no tensor blk.0.attn_q.weight"),
    "a factor that is NaN": (
        replaced(struct.pack("<2f", 4, 4), struct.pack("<2f", 4, math.nan)),
        "rope_freqs.weight has the value nan; all must be finite",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_in_one_line(name: str, tiny: bytes, tmp_path: Path) -> None:
    change, message = BROKEN[name]
    (tmp_path / "broken.gguf").write_bytes(change(tiny))
    with pytest.raises(PenstockError) as refused:
        LLM(tmp_path / "broken.gguf", num_gpu_blocks_override=20, weight_cache_dir="none")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_overlapping_tensors_are_refused(tiny: bytes, tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(tiny)
    file = GGUFFile(tmp_path / "good.gguf")
    second = sorted(tensor.offset for tensor in file.tensors.values())[1]
    start = min(tensor.offset for tensor in file.tensors.values())
    at = tiny.rindex(u64(second - start), 0, start)
    (tmp_path / "broken.gguf").write_bytes(tiny[:at] + u64(0) + tiny[at + 8 :])
    with pytest.raises(PenstockError, match="overlap"):
        resolve(tmp_path / "broken.gguf")


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_raises_one_line_error_or_none(seed: int, tiny: bytes, tmp_path: Path) -> None:
    """Bytes of the header are changed, removed or inserted, or the file is truncated. Little memory is allocated."""
    rng, content = random.Random(seed), bytearray(tiny)
    header = tiny.index(b"output_norm.weight") + 200
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(header, len(content)))
        match rng.randrange(5):
            case 0:
                content[at] = rng.randrange(256)
            case 1:
                content[at : at + 8] = u64(rng.choice([0, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**40)]))
            case 2:
                del content[at : at + rng.randint(1, 40)]
            case 3:
                content[at:at] = rng.randbytes(rng.randint(1, 40))
            case 4:
                del content[rng.randrange(1, len(content)) :]
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        folder = checkpoint_folder(file)
        config = json.loads((folder / "config.json").read_text())
        weights = GGUFCheckpoint(folder, [file], config["head_dim"])
        weights.read("model.norm.weight", config["hidden_size"])
    except PenstockError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * 2**20


@pytest.mark.slow
def test_hub_name_with_quantization_resolves_to_gguf_file(tmp_path: Path) -> None:
    write_gguf(demo.CHAT, tmp_path / "chat-Q8_0.gguf")
    hub = Hub()
    hub.files[NEW] = {"chat-Q8_0.gguf": (tmp_path / "chat-Q8_0.gguf").read_bytes(), "README.md": b"# A model"}
    try:
        folder = Client(hub.url, tmp_path / "hf").resolve("org/chat:Q8_0", env={"XDG_CACHE_HOME": str(tmp_path)})
    finally:
        hub.stop()
    sampling = SamplingParams(temperature=0, max_tokens=8)
    texts = [LLM(model).generate("A", sampling)[0].outputs[0].text for model in (folder, tmp_path / "chat-Q8_0.gguf")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_gguf_file_in_hugging_face_cache_is_used_offline(tmp_path: Path) -> None:
    """The cache is as after ``hf download org/chat chat-Q8_0.gguf``. The name is with and without the quantization."""
    model = tmp_path / "hf" / "hub" / "models--org--chat"
    for path, content in (("refs/main", NEW.encode()), (f"snapshots/{NEW}/README.md", b"# A model")):
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_bytes(content)
    write_gguf(demo.CHAT, model / "snapshots" / NEW / "chat-Q8_0.gguf")
    client = Client("http://127.0.0.1:1", tmp_path / "hf")
    environment = {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    folder = client.resolve("org/chat:Q8_0", env=environment)
    assert (folder / "model.gguf").resolve() == model / "snapshots" / NEW / "chat-Q8_0.gguf"
    assert client.resolve("org/chat", env=environment) == folder
    assert "HF_HUB_OFFLINE is set" in client.ask("org/chat:Q4_K_M", env=environment)["message"]
