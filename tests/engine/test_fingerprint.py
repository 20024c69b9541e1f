"""Engine fingerprint: it differs if and only if the same weights give other bits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fingerprints
import pytest
from checkpoints import SMALL, save
from fingerprints import OPTIONS, fingerprint_and_results
from transformers import LlamaConfig

from penstock import LLM

cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
kernels: Any = cpu._kernels

SAME: list[dict[str, Any]] = [
    {},
    {"threads": 1},
    {"max_model_len": 200},
    {"max_num_batched_tokens": 32},
    {"enable_prefix_caching": False},
    {"enable_lora": True},
    {"block_size": 16},
    {"block_size": 48},
    {"block_size": 128},
    {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
]
"""Options that leave the bits unchanged."""
OTHER: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"kv_cache_dtype": "int8"},
    {"ops": "reference"},
    *({"quantization": name} for name in ("w8a8", "w4a8", "wint8", "wint4")),
]
"""Options that change the bits."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(LlamaConfig(**SMALL), folder)
    return folder


@pytest.fixture
def instruction_set() -> Iterator[None]:
    before = kernels.current()
    yield
    kernels.use(before)


@pytest.mark.slow
def test_fingerprint_changes_only_if_bits_change(checkpoint: Path) -> None:
    usual = {fingerprint_and_results(checkpoint, **options) for options in SAME}
    assert len(usual) == 1
    others = [fingerprint_and_results(checkpoint, **options) for options in OTHER]
    assert len({bits for _, bits in [*usual, *others]}) == len(OTHER) + 1, "each of these options must change the bits"
    assert len({fingerprint for fingerprint, _ in [*usual, *others]}) == len(OTHER) + 1


@pytest.mark.slow
def test_fingerprint_depends_on_instruction_set(checkpoint: Path, instruction_set: None) -> None:
    found = []
    for name in kernels.available():
        kernels.use(name)
        found.append(fingerprint_and_results(checkpoint))
    assert len({fingerprint for fingerprint, _ in found}) == len(found)
    assert len(found) == 1 or len({bits for _, bits in found}) > 1


@pytest.mark.slow
def test_fingerprint_changes_with_bits_of_pytorch_instruction_set(checkpoint: Path) -> None:
    """Log probabilities are computed by PyTorch, which has kernels for several instruction sets."""
    found = []
    for capability in ("default", "avx2"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, fingerprints.__file__, str(checkpoint)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(ran.stdout.splitlines()[-2:])
    (first, first_bits), (second, second_bits) = found
    assert (first == second) == (first_bits == second_bits)


@pytest.mark.slow
def test_fingerprint_depends_on_length_of_dynamic_rope(tmp_path: Path) -> None:
    dynamic = {"rope_theta": 10_000.0, "rope_type": "dynamic", "factor": 4.0}
    save(LlamaConfig(**SMALL | {"max_position_embeddings": 160}, rope_parameters=dynamic), tmp_path)
    found = [fingerprint_and_results(tmp_path, max_model_len=length) for length in (170, 300, 600)]
    assert len({bits for _, bits in found}) == len({fingerprint for fingerprint, _ in found}) == 3
    config = json.loads((tmp_path / "config.json").read_text())
    short = {"max_position_embeddings": 640, "rope_parameters": dynamic | {"factor": 1.0}}
    (tmp_path / "config.json").write_text(json.dumps(config | short))
    within = {fingerprint_and_results(tmp_path, max_model_len=length) for length in (170, 300)}
    assert len(within) == 1, "within the trained length, max_model_len must not matter"


def test_weights_version_depends_on_contents_only(checkpoint: Path, tmp_path: Path) -> None:
    """The weights version identifies the weights of a block in the prefix cache."""

    def version(folder: Path = checkpoint, **options: Any) -> str:
        return LLM(folder, **OPTIONS | options).engine.info.weights_version

    before = version()
    assert version(dtype="float32", quantization="none") == before
    dummies = {version(load_format="dummy", seed=seed) for seed in (1, 2)}
    assert len(dummies | {before}) == 3
    copied = tmp_path / "copied"
    shutil.copytree(checkpoint, copied)
    first = version(copied)
    assert first == before, "the version depends on the path"
    dummy = version(copied, load_format="dummy", seed=1)
    assert dummy in dummies
    weights = copied / "model.safetensors"
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert version(copied) != first
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    assert version(copied, load_format="dummy", seed=1) != dummy
