"""Fill in the middle: token ids of prompts per model family, and requests over HTTP to a model with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from checkpoints import SMALL, save
from serving import Served, Servers
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Fast
from transformers import LlamaConfig

from penstock import demo
from penstock.core import PenstockError
from penstock.text import Tokenizer
from penstock.text.infill import FIM_TOKENS, infill_format, infill_prompt

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
QWEN = FIM_TOKENS[0]


def add_tokens(folder: Path, tokens: list[str]) -> Path:
    """Save the demo model's tokenizer with additional special tokens."""
    fast = Fast.from_file(str(demo.CHAT / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((demo.CHAT / "tokenizer_config.json").read_text())
    return folder


@pytest.mark.parametrize("tokens", FIM_TOKENS, ids=lambda tokens: tokens.prefix)
def test_prompt_of_each_family_has_its_token_order(tokens: Any, tmp_path: Path) -> None:
    present = [token for token in (tokens.prefix, tokens.suffix, tokens.middle) if token]
    tokenizer = Tokenizer(add_tokens(tmp_path, present))
    text = f"{tokens.prefix}{PREFIX}{tokens.suffix}{SUFFIX}{tokens.middle}"
    if not tokens.middle:
        text = f"{tokens.suffix}{SUFFIX}{tokens.prefix}{PREFIX}"
    ids = infill_prompt(tokenizer, PREFIX, SUFFIX)
    assert ids == tokenizer.encode(text) and tokenizer.decode(ids, False) == text
    assert infill_prompt(tokenizer, tokenizer.encode(PREFIX), tokenizer.encode(SUFFIX)) == ids


def test_end_tokens_are_found_in_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer(add_tokens(tmp_path, [QWEN.prefix, QWEN.suffix, QWEN.middle, "<|file_sep|>"]))
    found = infill_format(tokenizer)
    assert found.file == tokenizer.token_to_id("<|file_sep|>") and found.repository is None
    assert found.ends == (found.file, tokenizer.token_to_id("<|endoftext|>"))


def test_suffix_is_encoded_without_leading_space(tmp_path: Path) -> None:
    """In CodeLlama, the SentencePiece vocabulary prepends a space to a text, and a prompt begins with ``<s>``."""
    tokens = FIM_TOKENS[3]
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "▁b"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    vocabulary = {piece: number for number, piece in enumerate(pieces + bytes_)}
    fast = Fast(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    markers = [tokens.prefix, tokens.suffix, tokens.middle, *tokens.ends]
    fast.add_special_tokens(
        ["<s>", "</s>", *[AddedToken(marker, special=True, normalized=False) for marker in markers]]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tokenizer = Tokenizer(tmp_path)
    expected = ["<s>", "▁<PRE>", "▁a", "b", "▁b", "▁<SUF>", "b", "▁a", "▁<MID>"]
    assert infill_prompt(tokenizer, "ab b", "b a") == [tokenizer.token_to_id(token) for token in expected]
    assert infill_format(tokenizer).ends == (tokenizer.token_to_id("▁<EOT>"),)


def test_infill_without_fim_tokens_is_refused(servers: Servers) -> None:
    with pytest.raises(PenstockError, match="no fill-in-the-middle tokens"):
        infill_prompt(Tokenizer(demo.CHAT), PREFIX, SUFFIX)
    root = servers.get().root
    for path, body in (
        ("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX}),
        ("/api/generate", {"model": "penstock-demo", "prompt": PREFIX, "suffix": SUFFIX}),
        ("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX}),
    ):
        answer = httpx.post(root + path, json=body)
        assert answer.status_code == 400 and "no fill-in-the-middle tokens" in answer.text


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Tokenizer]]:
    """Server of a model with random weights and the tokens of Qwen2.5-Coder, and the model's tokenizer."""
    folder = tmp_path_factory.mktemp("coder")
    save(LlamaConfig(**SMALL | {"vocab_size": 3600, "max_position_embeddings": 512}), folder)
    add_tokens(folder, [QWEN.prefix, QWEN.suffix, QWEN.middle, *QWEN.ends[:3]])
    with Served("--model", str(folder), "--dtype", "float32", "--num-gpu-blocks-override", "100") as served:
        yield served, Tokenizer(folder)


@pytest.mark.row("vllm", "suffix")
def test_completions_suffix_builds_infill_prompt(coder: tuple[Served, Tokenizer]) -> None:
    served, tokenizer = coder
    ids = infill_prompt(tokenizer, PREFIX, SUFFIX)
    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def complete(**fields: Any) -> dict[str, Any]:
        answer = httpx.post(f"{served.url}/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])

    filled, plain = complete(prompt=PREFIX, suffix=SUFFIX), complete(prompt=ids)
    assert filled["prompt_token_ids"] == ids and filled["token_ids"] == plain["token_ids"]
    assert complete(prompt=tokenizer.encode(PREFIX), suffix=SUFFIX)["prompt_token_ids"] == ids
    assert complete(prompt=PREFIX, suffix=SUFFIX, echo=True)["text"] == PREFIX + filled["text"]
    assert complete(prompt=PREFIX, suffix="")["prompt_token_ids"] == tokenizer.encode(PREFIX)
    forced = {"logit_bias": {str(tokenizer.token_to_id("<|file_sep|>")): 100}}
    assert complete(prompt=PREFIX, suffix=SUFFIX, **forced)["finish_reason"] == "stop"
    refused = httpx.post(f"{served.url}/completions", json={"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 3})
    assert refused.status_code == 400 and "truncate_prompt_tokens" in refused.text


@pytest.mark.row("ollama", "suffix")
def test_ollama_suffix_builds_infill_prompt(coder: tuple[Served, Tokenizer]) -> None:
    served, tokenizer = coder
    client = ollama.Client(served.root)
    name = client.list().models[0].model or ""
    assert "insert" in (client.show(name).capabilities or ())
    options = {"temperature": 0, "num_predict": 8}
    answer = client.generate(name, PREFIX, suffix=SUFFIX, options=options)
    assert answer.prompt_eval_count == len(infill_prompt(tokenizer, PREFIX, SUFFIX))
    body = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0}
    assert answer.response == httpx.post(f"{served.url}/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.row("llama-server", "/infill")
def test_llama_server_infill_matches_completions(coder: tuple[Served, Tokenizer]) -> None:
    served = coder[0]
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 8, "temperature": 0}

    def fill(**fields: Any) -> dict[str, Any]:
        answer = httpx.post(f"{served.root}/infill", json=body | fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    completed = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0}
    filled = fill()
    assert filled["content"] == httpx.post(f"{served.url}/completions", json=completed).json()["choices"][0]["text"]
    assert filled["prompt"] == f"{QWEN.prefix}{PREFIX}{QWEN.suffix}{SUFFIX}{QWEN.middle}"
    assert fill(prompt="a +")["prompt"] == filled["prompt"] + "a +"
    files = [{"filename": "b.py", "text": "x = 1\n"}, {"text": "y = 2\n"}]
    before = "<|repo_name|>myproject\n<|file_sep|>b.py\nx = 1\n<|file_sep|>tmp\ny = 2\n<|file_sep|>filename\n"
    assert fill(input_extra=files)["prompt"] == before + filled["prompt"]
    forced = fill(logit_bias=[["<|file_sep|>", 100]])
    assert (forced["stop_type"], forced["content"]) == ("eos", "")
