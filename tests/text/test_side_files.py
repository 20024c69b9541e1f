"""Tokenizer configuration files against transformers: special and added tokens, chat templates, legacy vocabularies."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, Qwen3_5Tokenizer

from penstock import demo
from penstock.core import Code, GuidedDecodingParams, PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.text import Tokenizer
from penstock.text.vocabulary import byte_alphabet

TEXTS = (
    "the river runs, it's 123",
    "a<tool>b <extra>  c<bos><eos> <pad>x",
    "a [PAD] b<new> <bos> [MASK]c  <audio>",
    "<|endoftext|> <s>The  RIVER</s> é 河\n\n ",
    "e\u0301te\u0301 \u0915\u094d\u0937\u0947\u0924\u094d\u0930 1234",
)
ROLES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "image_token": "<image>",
}
NEW_ROLES = {"audio_token": "<audio>", "mask_token": "[MASK]", "pad_token": "[PAD]"}
"""Special tokens by role that are not in the vocabulary of ``tokenizer.json``."""
ADDED = ("<tool>", "<extra>", "<more>")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "default": "{{ bos_token }}{{ image_token }}{{ messages[0].content }}{{ eos_token }}",
    "tool_use": "{{ eos_token }}{{ tools[0].function.name }}{{ messages[0].content }}",
    "rag": "rag {{ messages[0].content }}",
}


def merges(count: int = 300) -> list[tuple[str, str]]:
    """The first ``count`` merges of the demo model's tokenizer."""
    return [tuple(pair) for pair in json.loads((demo.CHAT / "tokenizer.json").read_text())["model"]["merges"][:count]]


def vocabulary(*first: str) -> dict[str, int]:
    return {token: i for i, token in enumerate([*first, *byte_alphabet(), *(a + b for a, b in merges())])}


FULL = vocabulary(*ROLES.values())


def full_tokenizer() -> str:
    """``tokenizer.json`` without added tokens."""
    full = LibraryTokenizer(models.BPE(FULL, merges()))
    full.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    full.decoder = decoders.ByteLevel()
    return str(full.to_str())


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@st.composite
def token_objects(draw: st.DrawFn, content: str, in_config: bool) -> dict[str, Any]:
    """A special token as JSON object with random flags."""
    flags = {name: draw(st.booleans()) for name in ("lstrip", "rstrip", "single_word")}
    if draw(st.booleans()):
        flags["normalized"] = draw(st.booleans())
    return {"content": content, **flags, **({"__type": "AddedToken"} if in_config else {})}


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """Tokenizer files by name; each setting is in a random one of the files allowed for it."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    special: dict[str, Any] = {}
    as_object = draw(st.booleans())
    modern = draw(st.booleans())
    roles = ROLES | draw(st.sampled_from([{}, NEW_ROLES]))
    for role, token in roles.items():
        place = config if modern else draw(st.sampled_from([config, special]))
        place[role] = draw(token_objects(token, place is config)) if as_object else token
    extra = draw(st.sampled_from([[], ["<extra>"], ["<new>", "<extra>"]]))
    if modern or draw(st.booleans()):
        config["additional_special_tokens"] = extra
    else:
        special["extra_special_tokens"] = extra
    size = len(FULL)
    flags = st.booleans()
    if modern:
        config["added_tokens_decoder"] = {
            str(size + i): {
                "content": token,
                "special": draw(flags),
                "lstrip": draw(flags),
                "rstrip": draw(flags),
                "normalized": draw(flags),
                "single_word": draw(flags),
            }
            for i, token in enumerate(ADDED)
        }
    files: dict[str, Any] = {"tokenizer_config.json": config}
    if special:
        files["special_tokens_map.json"] = special
    if not modern and draw(flags):
        files["added_tokens.json"] = {token: size + i for i, token in enumerate(ADDED)}
    elif not modern:
        for place in (config, special):
            place.pop("additional_special_tokens", place.pop("extra_special_tokens", None))
    return files | draw(templates(config))


@st.composite
def templates(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, str]:
    """Chat template files; some templates are put into ``config`` instead."""
    files = {}
    match draw(st.sampled_from(["text", "list", "object", "none"])):
        case "text":
            config["chat_template"] = TEMPLATES["default"]
        case "list":
            config["chat_template"] = [{"name": name, "template": text} for name, text in TEMPLATES.items()]
        case "object":
            config["chat_template"] = TEMPLATES
        case "none":
            files["chat_template.jinja"] = TEMPLATES["default"]
    if files or draw(st.booleans()):
        files["chat_template.jinja"] = "jinja " + TEMPLATES["default"]
        if draw(st.booleans()):
            files["additional_chat_templates/tool_use.jinja"] = "jinja " + TEMPLATES["tool_use"]
    return files


def compare(folder: Path, ids: list[int] | None = None, templated: bool = True) -> None:
    """Compare encoding, decoding, special tokens and chat rendering with transformers."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    for text in TEXTS:
        for with_special in (False, True):
            expected = theirs.encode(text, add_special_tokens=with_special)
            assert ours.encode(text, with_special) == expected, text
        for skip in (False, True):
            expected_text = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(expected, skip) == expected_text
    assert ours.special == {role: str(token) for role, token in theirs.special_tokens_map.items()}
    if not templated:
        return
    for tools in (None, TOOLS):
        messages = [{"role": "user", "content": "Hello"}]
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages, tools=tools) == expected


@given(files=checkpoints())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_settings_are_read_from_any_allowed_file(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, content in {**files, "tokenizer.json": full_tokenizer()}.items():
        write(folder / name, content)
    compare(folder)


BYTE_LEVEL: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "GPT-2": (("<|endoftext|>",), {}, {"model_type": "gpt2"}),
    "GPT-2 by class": (("<|endoftext|>",), {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}),
    "OPT": (
        ("<pad>", "</s>", "<unk>"),
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_bos_token": True,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"),
        },
        {"model_type": "opt"},
    ),
    "Qwen2": (("<|endoftext|>",), {"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen3"}),
    "Qwen3 with images": (("<|endoftext|>",), {}, {"model_type": "qwen3_vl_moe"}),
    "GPT-NeoX": (("<|endoftext|>", "<|padding|>"), {}, {"model_type": "gpt_neox"}),
    "OLMo": (("<|endoftext|>", "<|padding|>"), {"tokenizer_class": "GPTNeoXTokenizerFast"}, {"model_type": "olmo"}),
    "RoBERTa": (("<s>", "<pad>", "</s>", "<unk>", "<mask>"), {}, {"model_type": "roberta"}),
    "Starcoder2": (("<|endoftext|>",), {"tokenizer_class": "GPT2TokenizerFast"}, {"model_type": "starcoder2"}),
}
"""First tokens of ``vocab.json``, then contents of ``tokenizer_config.json`` and ``config.json``, by case."""


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_vocab_json_and_merges_txt_match_transformers(tmp_path: Path, name: str) -> None:
    first, config, model = BYTE_LEVEL[name]
    vocab = vocabulary(*first)
    write(tmp_path / "vocab.json", vocab)
    write(tmp_path / "merges.txt", "\n".join(["#version: 0.2", *(f"{a} {b}" for a, b in merges())]) + "\n")
    write(tmp_path / "added_tokens.json", {token: len(vocab) + i for i, token in enumerate(ADDED)})
    for path, content in (("tokenizer_config.json", config), ("config.json", model)):
        if content:
            write(tmp_path / path, content)
    compare(tmp_path, templated=False)


def test_qwen3_5_without_tokenizer_json_matches_transformers(tmp_path: Path) -> None:
    """transformers reads this vocabulary only from ``tokenizer.json``; the test passes it as arguments instead."""
    vocab = vocabulary("<|endoftext|>")
    write(tmp_path / "vocab.json", vocab)
    write(tmp_path / "merges.txt", "\n".join(f"{a} {b}" for a, b in merges()))
    write(tmp_path / "config.json", {"model_type": "qwen3_5_moe"})
    theirs, ours = Qwen3_5Tokenizer(vocab, merges()), Tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_whisper_without_tokenizer_json_matches_transformers(tmp_path: Path) -> None:
    """The folder has the files that fine-tuning scripts save."""
    vocab = vocabulary("<|endoftext|>")
    write(tmp_path / "vocab.json", vocab)
    write(tmp_path / "merges.txt", "\n".join(f"{a} {b}" for a, b in merges()))
    special = ("<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>", "<|0.00|>")
    write(tmp_path / "added_tokens.json", {token: len(vocab) + i for i, token in enumerate(special)})
    write(tmp_path / "special_tokens_map.json", {"additional_special_tokens": special[:-1]})
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "WhisperTokenizer"})
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "<|startoftranscript|><|de|><|0.00|> the river"):
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
    assert [ours.token_to_id(token) for token in special] == theirs.convert_tokens_to_ids(special)


def test_vocab_json_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "vocab.json", vocabulary())
    write(tmp_path / "merges.txt", "")
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(PenstockError, match=r"tokenizer_class CLIPTokenizer.*add its tokenizer\.json") as refused:
        Tokenizer(tmp_path)
    assert refused.value.failure.code is Code.UNSUPPORTED


@pytest.mark.parametrize("legacy", ["processor_config.json", "chat_template.json"])
@pytest.mark.parametrize("other", ["chat_template.jinja", "tokenizer_config.json", "none"])
def test_processor_template_takes_precedence(tmp_path: Path, legacy: str, other: str) -> None:
    write(tmp_path / "tokenizer.json", full_tokenizer())
    write(tmp_path / "preprocessor_config.json", {})
    write(tmp_path / legacy, {"chat_template": "of the processor"})
    if other != "none":
        write(tmp_path / other, "other" if other.endswith("jinja") else {"chat_template": "other"})
    assert Tokenizer(tmp_path).template_source == "of the processor"


@pytest.mark.parametrize("size", [512, 600])
def test_tekken_file_matches_tiktoken(tmp_path: Path, size: int) -> None:
    """In Mistral's format, special tokens have the first ids; ranks beyond ``default_vocab_size`` are ignored."""
    ranks = [bytes([byte]) for byte in range(256)]
    alphabet = byte_alphabet()
    ranks += dict.fromkeys(bytes(alphabet[c] for c in a + b) for a, b in merges())
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    entries = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(ranks)]
    config = {"pattern": pattern, "default_vocab_size": size, "default_num_special_tokens": 64}
    special = [{"rank": 2, "token_str": "</s>"}, {"rank": 1, "token_str": "<s>"}, {"rank": 9, "token_str": "[TOOL]"}]
    write(tmp_path / "tekken.json", {"config": config, "vocab": entries, "special_tokens": special})
    known = {token: i for i, token in enumerate(ranks[: size - 64])}
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=known, special_tokens={})
    ours = Tokenizer(tmp_path)
    for text in TEXTS:
        text = text.replace("</s>", "").replace("<s>", "")
        ids = [64 + rank for rank in theirs.encode(text)]
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == text
    assert ours.encode("[TOOL]", False) == [9]
    assert (ours.special["eos_token"], ours.id_to_token(63)) == ("</s>", "<SPECIAL_63>")


def test_token_outside_the_models_vocabulary_is_refused_in_prompts(tmp_path: Path) -> None:
    """The added token gets the next id, for which the model has no embedding. Guided decoding works without it."""
    shutil.copytree(demo.CHAT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write(tmp_path / "tokenizer_config.json", config | {"additional_special_tokens": ["[NEW]"]})
    llm = LLM(tmp_path, num_gpu_blocks_override=64, weight_cache_dir="none")
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert Tokenizer(tmp_path).token_to_id("[NEW]") == size
    with pytest.raises(PenstockError, match=f"token ids go from 0 to {size - 1}, and {size} is given"):
        llm.generate(["Once [NEW]"], use_tqdm=False)
    sampling = SamplingParams(guided_decoding=GuidedDecodingParams(regex="[a-c]{3}"))
    (answer,) = llm.generate(["Once"], sampling, use_tqdm=False)
    assert re.fullmatch("[a-c]{3}", answer.outputs[0].text)
