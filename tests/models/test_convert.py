"""``penstock convert``: writes the tensors of checkpoints and engine folders to other files, with other dtypes."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from quantized import KINDS, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from penstock import PenstockError
from penstock.calibration.options import QuantizeOptions
from penstock.calibration.quantize import quantize as quantize_checkpoint
from penstock.checkpoint.sentence_transformers import read_dense_modules, read_modules, transformer_folder
from penstock.cli.main import main
from penstock.config.options import EngineOptions
from penstock.engine.engine_folder import build_engine
from penstock.models.convert import convert


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with biases and an untied head."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen2Config(**SMALL, tie_word_embeddings=False), folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_converted_tensors_are_equal_in_any_shards_and_dtype(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    assert convert(checkpoint, tmp_path / "a", dtype=dtype, max_shard_size=100_000) > 2
    expected = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors(checkpoint).items()}
    assert_equal(tensors(tmp_path / "a"), expected)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == str(dtype or torch.float32)[6:]
    sizes = [file.stat().st_size for file in (tmp_path / "a").glob("*.safetensors")]
    assert max(sizes) < 110_000 and (tmp_path / "a" / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=dtype)
    assert_equal({name: tensor for name, tensor in loaded.state_dict().items() if name in expected}, expected)
    assert convert(tmp_path / "a", tmp_path / "b") == 1
    assert_equal(tensors(tmp_path / "b"), expected)


def test_pytorch_files_are_converted_to_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    expected = tensors(checkpoint)
    first = {name: tensor for name, tensor in expected.items() if "layers" in name}
    torch.save(first, tmp_path / "old" / "pytorch_model-00001-of-00002.bin")
    torch.save(
        {name: expected[name] for name in expected.keys() - first},
        tmp_path / "old" / "pytorch_model-00002-of-00002.bin",
    )
    files = {name: f"pytorch_model-0000{2 - (name in first)}-of-00002.bin" for name in expected}
    (tmp_path / "old" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    convert(tmp_path / "old", tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"config.json", "model.safetensors"}
    assert_equal(tensors(tmp_path / "new"), expected)


@pytest.mark.parametrize(
    "kind", ["gptq 8 bits, act-order", "fp8 blocks", "bitsandbytes nf4, double quantization, bytes in bfloat16"]
)
def test_quantized_tensors_are_unchanged(tmp_path: Path, kind: str) -> None:
    quantize(tmp_path / "a", KINDS[kind])
    before = tensors(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", dtype=torch.float16)
    floats = (torch.bfloat16, torch.float32)
    assert_equal(
        tensors(tmp_path / "b"),
        {
            name: tensor.half()
            if tensor.dtype in floats and name.endswith((".weight", ".bias")) and f"{name}.absmax" not in before
            else tensor
            for name, tensor in before.items()
        },
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"ops": "reference"}, {"dtype": "bfloat16", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}],
    ids=str,
)
def test_engine_folder_is_converted_to_its_checkpoint(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    build_engine(EngineOptions(model=str(checkpoint), **options), tmp_path / "engine", notes={"about": "it"})
    convert(tmp_path / "engine", tmp_path / "new", max_shard_size=100_000)
    dtype = getattr(torch, options.get("dtype", "float32"))
    assert_equal(tensors(tmp_path / "new"), {name: tensor.to(dtype) for name, tensor in tensors(checkpoint).items()})
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (checkpoint, tmp_path / "new"))
    assert after == before | {"dtype": str(dtype)[6:]}


def test_impossible_conversion_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    build_engine(EngineOptions(model=str(checkpoint), quantization="w8a8"), tmp_path / "engine")
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file({"x": torch.tensor([1.0, 1e6])}, tmp_path / "large" / "model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    for folder, output, message in (
        (
            "engine",
            "new",
            "has quantized weights, which cannot be converted back: convert the checkpoint that it was built",
        ),
        ("large", "new", "dtype: tensor x has values up to "),
        ("large", "large", "is the folder of the model: name another"),
        ("large", "other", "already has model.safetensors: name an empty or new folder"),
    ):
        with pytest.raises(PenstockError, match=message):
            convert(tmp_path / folder, tmp_path / output, dtype=torch.float16)
        assert not (tmp_path / "new" / "config.json").exists()


def test_killed_conversion_resumes(tmp_path: Path) -> None:
    flags = ["--max-shard-size", "200KB", "--dtype", "float32", "--output-dir"]
    assert main(["convert", *flags, str(tmp_path / "whole")]) == 0
    expected, folder, draw = digest(tmp_path / "whole"), tmp_path / "killed", random.Random(0)
    command = [sys.executable, "-m", "penstock.cli.main", "convert", *flags, str(folder)]
    number = draw.randrange(len(expected))
    converting = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while converting.poll() is None and len(list(folder.glob("*"))) < number:
        pass
    converting.kill()
    converting.wait()
    if (folder / "config.json").exists():  # the conversion had finished before the kill
        assert digest(folder) == expected
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert main(["convert", *flags, str(folder)]) == 0
    assert digest(folder) == expected
    assert all(path.stat().st_mtime_ns == times[path] for path in times)


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
@pytest.mark.parametrize("made_by", ["convert", "build", "quantize"])
def test_modules_of_sentence_transformers_are_copied(made_by: str, inner: str, tmp_path: Path) -> None:
    """The modules are pooling, dense layers with their weights, and prompts; the module Transformer may have a separate
    folder."""
    folder, output = tmp_path / "model", tmp_path / "new"
    save(LlamaConfig(**SMALL | {"vocab_size": 3584, "num_hidden_layers": 1}), folder / inner)
    kinds = {inner: "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "search: "}}))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    dense = {"in_features": 64, "out_features": 8, "bias": False}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.ones(8, 64)}, folder / "2_Dense" / "model.safetensors")
    if made_by == "convert":
        convert(folder / inner, output)
    elif made_by == "build":
        build_engine(EngineOptions(model=str(folder / inner), dtype="float32"), output)
    else:
        options = QuantizeOptions("wint4", group_size=32, calib_size=4, calib_seq_len=64, eval_size=1)
        quantize_checkpoint(folder / inner, output, options, threads=1, progress=False)
    given, kept = ([(each.kind, read_dense_modules(at)) for each in read_modules(at) or ()] for at in (folder, output))
    assert [kind for kind, _ in kept] == [kind for kind, _ in given]
    assert transformer_folder(output) == output
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (output / name).read_bytes() == (folder / name).read_bytes()
    assert (output / "config_sentence_transformers.json").is_file()


def test_engine_folder_with_padded_heads_is_refused(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, head_dim=24), tmp_path / "model")
    build_engine(EngineOptions(model=str(tmp_path / "model"), dtype="float32"), tmp_path / "engine")
    with pytest.raises(PenstockError, match="heads of 24 elements, which the build padded with zeros"):
        convert(tmp_path / "engine", tmp_path / "new")
