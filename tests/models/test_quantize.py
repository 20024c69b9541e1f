"""``penstock quantize``: the checkpoint matches the report, with less error than rounding; interrupted runs resume."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import calibration
import outliers
import pytest
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from penstock import LLM, SamplingParams, demo
from penstock.calibration import texts, writer
from penstock.calibration.layer import LayerQuantizer
from penstock.calibration.options import METHODS, QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.calibration.stage import ChangedWeights, build_stage, run_stage
from penstock.calibration.statistics import InputObserver
from penstock.calibration.writer import read_tensors
from penstock.cli.main import main
from penstock.core import PenstockError
from penstock.models import read_config
from penstock.models.weights import Checkpoint
from penstock.ops import reference
from penstock.quant import read_quantization_config
from penstock.text import Tokenizer

QUICK: dict[str, Any] = {"calib_size": 6, "calib_seq_len": 128, "eval_size": 2}
LAYERS = 2
COMMAND = [sys.executable, "-m", "penstock.cli.main", "quantize"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantized(model: Path, output: Path, method: str, **options: Any) -> dict[str, Any]:
    """Quantize a checkpoint and return the report."""
    return quantize(model, output, QuantizeOptions(method, **QUICK | options), threads=1, progress=False)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def stored(folder: Path) -> Checkpoint:
    config = read_config(folder)
    assert config.quantization_config
    return Checkpoint(folder, read_quantization_config(config.quantization_config))


def matrices(folder: Path) -> dict[str, tuple[int, int]]:
    """Shapes of the layers' matrices of an unquantized checkpoint, by name."""
    tensors = load_file(folder / "model.safetensors")
    names = (name.removesuffix(".weight") for name in tensors)
    shapes = {name: tuple(tensors[f"{name}.weight"].shape) for name in names if name.endswith(PROJECTIONS)}
    return {name: (outputs, inputs) for name, (outputs, inputs) in shapes.items()}


def dequantized(folder: Path, name: str, shape: tuple[int, int]) -> Tensor:
    weight = stored(folder).read_quantized(name, *shape, (0, shape[0]))
    assert not isinstance(weight, Tensor)
    return weight.dequantize()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with grouped-query attention and biases."""
    folder = tmp_path_factory.mktemp("small")
    sizes = SMALL | {"vocab_size": 3584, "intermediate_size": 96, "num_hidden_layers": 2}
    save(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, dtype="float32"), folder)
    return folder


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with numbers of inputs that 128 does not divide."""
    folder = tmp_path_factory.mktemp("uneven")
    sizes = SMALL | {"vocab_size": 3584, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 1}
    save(LlamaConfig(**sizes, dtype="float32"), folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the demo model."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(demo.CHAT, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "layer_types": config["layer_types"][:LAYERS]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    dropped = tuple(f"model.layers.{layer}." for layer in range(LAYERS, 6))
    save_file({name: t for name, t in tensors.items() if not name.startswith(dropped)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def planted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with outliers in its activations, and unchanged outputs."""
    folder = tmp_path_factory.mktemp("planted")
    outliers.plant(model, folder)
    return folder


@pytest.mark.parametrize(("method", "rounded"), [("awq", "wint4"), ("gptq", "wint4"), ("smoothquant", "w8a8")], ids=str)
def test_method_beats_rounding_with_outliers_in_activations(
    planted: Path, tmp_path: Path, method: str, rounded: str
) -> None:
    """The methods run without rotation, which would spread outliers over many inputs."""
    options = {
        "calib_size": 12,
        "calib_seq_len": 256,
        "rotation": 0,
        "group_size": 0 if method == "smoothquant" else 128,
    }
    ours, plain = (quantized(planted, tmp_path / name, name, **options) for name in (method, rounded))
    assert ours["kl_divergence"] < 0.6 * plain["kl_divergence"]
    assert ours["layers"][-1]["error"] < 0.5 * plain["layers"][-1]["error"]
    assert ours["top1_agreement"] > plain["top1_agreement"]


@pytest.mark.parametrize(
    ("method", "rotation"), [*((method, None) for method in METHODS), ("gptq", 0), ("wint4", 0), ("w4a8", 32)]
)
def test_written_checkpoint_has_the_reported_perplexity(
    model: Path, tmp_path: Path, method: str, rotation: int | None
) -> None:
    """The engine computes the perplexity of the written checkpoint."""
    report = quantized(model, tmp_path / "made", method, rotation=rotation)
    sample = texts.read_samples("", Tokenizer(demo.CHAT), 8, 128, 0)[0].tolist()
    llm = LLM(tmp_path / "made", num_gpu_blocks_override=40, ops="reference")
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([sample], params, use_tqdm=False)
    logprobs = output.prompt_logprobs or []
    losses = [-place[token].logprob for place, token in zip(logprobs[1:], sample[1:], strict=True) if place]
    assert len(losses) == report["tokens"] == 127
    assert sum(losses) / 127 == pytest.approx(math.log(report["perplexity_quantized"]), rel=0.01)


@pytest.mark.parametrize(
    ("method", "rotation"),
    [("wint8", None), ("wint4", 0), ("wint4", None), ("w8a8", None), ("w8a8", 0), ("w4a8", None), ("fp8", None)],
)
def test_written_matrices_equal_rounding_at_load(
    model: Path, tmp_path: Path, method: str, rotation: int | None
) -> None:
    """The bits are identical to the result of ``pack`` for the original weights and the same format."""
    quantized(model, tmp_path / "made", method, rotation=rotation)
    original, scheme = load_file(model / "model.safetensors"), QuantizeOptions(method, rotation=rotation).scheme
    for name, shape in matrices(model).items():
        expected = reference.pack([original[f"{name}.weight"]], None, scheme.format_of(name))
        made = dequantized(tmp_path / "made", name, shape)
        rows = reference.embedding(torch.arange(shape[0]), replace(expected, dtype=torch.float32))
        assert torch.equal(made, rows), name


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_scaling_preserves_outputs_before_rounding(small: Path, method: str) -> None:
    """The model has shared key-value heads and biases, through which scales are also propagated."""
    config, checkpoint = read_config(small), Checkpoint(small)
    options, prefix = QuantizeOptions(method, group_size=32 if method == "awq" else 0), "model.layers.1."
    hidden = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
    observer, outputs = InputObserver(reference, 4 * 32, False), [torch.empty_like(hidden) for _ in range(2)]
    weights = ChangedWeights(checkpoint, {}, {})
    run_stage(build_stage(config, reference, weights, 1, torch.float32, 32, observer), reference, hidden, outputs[0])
    observer.finish()
    layer = LayerQuantizer(reference, config, options, prefix, read_tensors(checkpoint, prefix), observer.statistics)
    before = dict(layer.tensors)
    layer.scale()
    changed = {name for name, tensor in layer.tensors.items() if tensor is not before[name]}
    assert (f"{prefix}self_attn.v_proj.bias" in changed) == (method == "awq")
    assert {f"{prefix}input_layernorm.weight", f"{prefix}mlp.gate_proj.weight"} <= changed
    weights = ChangedWeights(checkpoint, layer.tensors, {})
    run_stage(build_stage(config, reference, weights, 1, torch.float32, 32), reference, hidden, outputs[1])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("act_order", ["none", "static", "group"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, -1)])
def test_gptq_act_order_is_written_and_error_is_small(
    small: Path, tmp_path: Path, act_order: str, bits: int, group_size: int
) -> None:
    options = {"act_order": act_order, "bits": bits, "group_size": group_size, "rotation": 0}
    report = quantized(small, tmp_path / "made", "gptq", **options)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    is_sorted = torch.equal(tensors[f"{name}.g_idx"], torch.arange(96) // (32 if group_size == 32 else 96))
    assert is_sorted == (act_order != "group" or group_size == -1)
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert (config["desc_act"], config["bits"], config["group_size"]) == (act_order == "group", bits, group_size)
    original = load_file(small / "model.safetensors")
    for name, shape in matrices(small).items():
        change = dequantized(tmp_path / "made", name, shape) - original[f"{name}.weight"]
        assert change.square().sum() < (0.04 if bits == 4 else 2e-4) * original[f"{name}.weight"].square().sum()
        assert report["layers"][int(name.split(".")[2])]["matrices"][name] < (0.02 if bits == 4 else 1e-4)


@pytest.mark.parametrize(
    ("method", "rotation"), [("wint4", None), ("w4a8", None), ("gptq", None), ("gptq", 0), ("awq", None)]
)
def test_group_size_that_does_not_divide_inputs_is_reduced(
    uneven: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, rotation: int | None
) -> None:
    """The largest smaller multiple of 8 that divides the inputs of all matrices, 192 and 576, is used and logged."""
    made = tmp_path / "made"
    quantized(uneven, made, method, group_size=128, rotation=rotation)
    assert "group size 128 does not divide the number of inputs of all matrices: using 96" in caplog.text
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "compressed-tensors":
        config = config["config_groups"]["group_0"]["weights"]
    assert config["group_size"] == 96
    original = load_file(uneven / "model.safetensors")
    for name, shape in matrices(uneven).items():
        change = dequantized(made, name, shape) - original[f"{name}.weight"]
        assert change.square().sum() < 0.05 * original[f"{name}.weight"].square().sum()
    assert LLM(made, num_gpu_blocks_override=40).generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize("method", ["wint4", "w4a8", "gptq"])
def test_sensitive_matrices_have_8_bits_with_rotation(model: Path, tmp_path: Path, method: str) -> None:
    """Without rotation, all matrices have the same format, so that other systems can read the checkpoint."""
    bits: dict[str, dict[str, int]] = {}
    for kind, rotation in (("rotated", None), ("plain", 0)):
        quantized(model, tmp_path / kind, method, rotation=rotation)
        bits[kind] = {name: stored(tmp_path / kind).format_of(name).bits for name in matrices(model)}
    assert set(bits["plain"].values()) == {4}
    assert bits["rotated"] == {name: 8 if name.endswith("v_proj") else 4 for name in bits["rotated"]}


def test_ignore_pattern_without_match_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="--ignore: down matches no matrix"):
        quantized(model, tmp_path / "made", "wint8", ignore=("lm_head", "down"))
    assert not (tmp_path / "made").exists()


def test_tied_tensors_of_pytorch_file_are_both_written(small: Path, tmp_path: Path) -> None:
    """In a PyTorch file, a tied head shares the memory of the embedding."""
    made, model = tmp_path / "made", tmp_path / "model"
    shutil.copytree(small, model)
    tensors = load_file(model / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    quantized(model, made, "wint8")
    written = load_file(made / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], head) and torch.equal(written["model.embed_tokens.weight"], head)


def test_ignored_matrices_are_not_quantized(model: Path, tmp_path: Path) -> None:
    ignored = ["model.layers.0.self_attn.k_proj", *(f"model.layers.{layer}.mlp.down_proj" for layer in range(LAYERS))]
    for method in ("gptq", "wint4"):
        output = tmp_path / method
        report = quantized(model, output, method, ignore=("layers.0.*.k_proj", "down_proj"))
        assert not {name for layer in report["layers"] for name in layer["matrices"]}.intersection(ignored)
        original, made = load_file(model / "model.safetensors"), load_file(output / "model.safetensors")
        for name in ignored:
            assert torch.equal(original[f"{name}.weight"], made[f"{name}.weight"])
        assert LLM(output, num_gpu_blocks_override=40).generate("A", SamplingParams(max_tokens=2), use_tqdm=False)
    config = json.loads((tmp_path / "wint4" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", *ignored}


def test_sharded_output_equals_single_file(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 200_000)
    quantized(small, tmp_path / "made", "wint8")
    files = sorted(path.name for path in (tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert LLM(tmp_path / "made", num_gpu_blocks_override=40)
    monkeypatch.undo()
    quantized(small, tmp_path / "whole", "wint8")
    tensors = [load_file(tmp_path / "made" / name) for name in files]
    merged = {name: tensor for shard in tensors for name, tensor in shard.items()}
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert merged.keys() == whole.keys() and all(torch.equal(merged[name], whole[name]) for name in whole)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "rotation"),
    [(name, None) for name in METHODS if QuantizeOptions(name).file_format == "compressed-tensors"]
    + [("w8a8", 0), ("wint4", 0)],
)
def test_transformers_computes_the_reported_perplexity(tmp_path: Path, method: str, rotation: int | None) -> None:
    """transformers reads the checkpoint with compressed-tensors, which is installed into a separate folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages")]
    subprocess.run([*pip, "compressed-tensors>=0.20", "loguru"], check=True)
    report = quantized(demo.CHAT, tmp_path / "made", method, rotation=rotation)
    samples = texts.read_samples("", Tokenizer(demo.CHAT), 8, 128, 0)[:1]
    torch.save(samples, tmp_path / "samples.pt")
    script = """
import json, sys, torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from transformers import AutoModelForCausalLM
model, ids = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16), torch.load(sys.argv[2])
with open(sys.argv[1] + "/config.json") as file:
    transforms = json.load(file)["quantization_config"].get("transform_config")
if transforms:  # transformers 5.24 does not apply them
    for group in transforms["config_groups"].values():
        group["apply"] = [each for each in group["apply"] if each["location"] == "input"]
    apply_transform_config(model, TransformConfig.model_validate(transforms))
with torch.no_grad():
    print(model(ids, labels=ids).loss.item())
"""
    command = [sys.executable, "-c", script, str(tmp_path / "made"), str(tmp_path / "samples.pt")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(math.log(report["perplexity_quantized"]), rel=0.01)


# --- Interrupted runs -------------------------------------------------------------------------------------------------


def start(checkpoint: Path, output: Path, method: str) -> subprocess.Popen[str]:
    flags = ["--method", method, "--output-dir", str(output), "--threads", "1"]
    flags += [part for name, value in QUICK.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen(
        [*COMMAND, str(checkpoint), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, ""), (signal.SIGINT, "run the same command to resume")]
)
def test_interrupted_run_resumes_to_the_same_bytes(model: Path, tmp_path: Path, number: int, message: str) -> None:
    """The output folder is refused while the run is active, and afterwards if the options differ."""
    process = start(model, tmp_path / "cut", "gptq")
    done = tmp_path / "cut" / ".quantize" / "layer-00000.json"
    while not done.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # pauses the run, so that it cannot finish before the next signal
    with pytest.raises(PenstockError, match="is in use by another quantization"):
        quantized(model, tmp_path / "cut", "gptq")
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert message in process.communicate()[0]
    assert not (tmp_path / "cut" / "config.json").exists()
    with pytest.raises(
        PenstockError, match="contains an unfinished run with other options \\(method is 'gptq', not 'awq'\\)"
    ):
        quantized(model, tmp_path / "cut", "awq")
    quantized(model, tmp_path / "cut", "gptq")
    quantized(model, tmp_path / "whole", "gptq")
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


def test_run_that_failed_to_start_does_not_block_the_next(small: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"words": "none"}')
    with pytest.raises(PenstockError, match=r"record 1 of .* has no valid field of text"):
        quantized(small, tmp_path / "made", "wint8", calib_dataset=str(tmp_path / "texts.jsonl"))
    quantized(small, tmp_path / "made", "wint8")


def test_default_group_size_of_wint4_divides_inputs(small: Path, tmp_path: Path) -> None:
    quantized(small, tmp_path / "made", "wint4")  # the inputs are multiples of 32, not of 128
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_run_with_changed_calibration_texts_is_refused(small: Path, tmp_path: Path) -> None:
    """The texts are compared by content, as the name of the file is the same."""
    file, made = tmp_path / "texts.txt", tmp_path / "made"
    file.write_text("The capital of France is Paris.\n" * 40)
    options: Any = {"calib_seq_len": 16, "calib_dataset": str(file)}
    report = quantized(small, made, "wint8", **options)
    file.write_text("One, two, three, four, five, six.\n" * 40)
    with pytest.raises(PenstockError, match=f"{made} was made with other options \\(texts "):
        quantized(small, made, "wint8", **options)
    (made / "config.json").unlink()
    for name in ("quantization_report.json", "quantization_report.html"):
        (made / name).unlink()
    (made / ".quantize").mkdir()
    (made / ".quantize" / "job.json").write_text(json.dumps({"job": report["job"], "details": {"threads": 1}}))
    (made / ".quantize" / "layer-00000.json").write_text("{}")
    with pytest.raises(PenstockError, match=f"{made} contains an unfinished run with other options \\(texts "):
        quantized(small, made, "wint8", **options)


def test_finished_run_is_not_repeated(small: Path, tmp_path: Path) -> None:
    report = quantized(small, tmp_path / "made", "wint8")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    (tmp_path / "made" / ".quantize").mkdir()  # state after a kill while the folder was removed
    assert quantized(small, tmp_path / "made", "wint8") == report
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()} == before
    with pytest.raises(PenstockError, match="was made with other options"):
        quantized(small, tmp_path / "made", "fp8")


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["awq", "gptq", "smoothquant", "w4a8"])
def test_run_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path, method: str) -> None:
    rng = Random(method)
    quantized(demo.CHAT, tmp_path / "whole", method)
    for attempt in range(8):
        output, kills, patience = tmp_path / str(attempt), 0, rng.uniform(1, 6)
        while True:
            process = start(demo.CHAT, output, method)
            try:
                output_text, _ = process.communicate(timeout=patience)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills, patience = kills + 1, rng.uniform(1, 6) + kills
        assert process.returncode == 0, output_text
        assert digests(output) == digests(tmp_path / "whole"), kills


# --- Reports and options ----------------------------------------------------------------------------------------------


def test_report_is_printed_and_written_as_json_and_html(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(small), "--method", "awq", "--group-size", "32", "--calib-size", "2", "--calib-seq-len", "32"]
    assert main(["quantize", *flags, "--output-dir", str(tmp_path / "made"), "--kv-cache-dtype", "int8"]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "made" / "quantization_report.json").read_text())
    assert f"{report['perplexity_original']:.4f} before, {report['perplexity_quantized']:.4f} after" in printed
    assert "the KV cache needs no calibration" in printed and "--kv-cache-dtype int8" in printed
    page = (tmp_path / "made" / "quantization_report.html").read_text()
    assert page.count("<svg") == 2 and "http" not in page and "down_proj" in page
    before, after = report["bytes_original"], report["bytes_quantized"]
    sizes = [sum(t.nbytes for t in load_file(f / "model.safetensors").values()) for f in (small, tmp_path / "made")]
    assert [before, after] == sizes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method gptqq", "--method: invalid choice: 'gptqq'"),
        ("--method awq --bits 8", "--bits: is 8; it must be 4 with awq"),
        ("--method gptq --bits 3", "--bits: is 3; it must be 4 or 8 with gptq"),
        (
            "--method w8a8 --group-size 128",
            "--group-size: is 128, but w8a8 has one scale per output: remove the",
        ),
        ("--method wint4 --group-size 12", "--group-size: is 12; it must be a multiple of 8, or -1"),
        ("--method awq --rotation 64", "--rotation: is 64; it must be 0 with awq. Methods with rotation: wint8, wint4"),
        ("--method gptq --rotation 48", "--rotation: is 48; it must be a power of two from 2 to 64, or 0"),
        ("--method awq --calib-size 0", "--calib-size: is 0; it must be at least 1"),
        ("--method smoothquant --smoothing-strength 2", "--smoothing-strength: is 2.0; it must be from 0 to 1"),
        ("--method awq --calib-dataset cnn_dailymail", "--calib-dataset: cnn_dailymail does not exist: name a file"),
        (
            "--method awq --output-dir FULL",
            "is not empty (it contains file): name an empty or new folder, or delete",
        ),
        (
            "--method awq --output-dir MODEL",
            "a checkpoint without a quantization_report.json: name an empty or new",
        ),
        ("--method awq --output-dir FULL/file", "cannot write to"),
    ],
)
def test_invalid_option_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    flags = flags.replace("FULL", str(tmp_path / "full")).replace("MODEL", str(demo.CHAT))
    output = [] if "--output-dir" in flags else ["--output-dir", str(tmp_path / "new")]
    try:
        status: object = main(["quantize", str(demo.CHAT), *output, *flags.split()])
    except SystemExit as ended:
        status = ended.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "sample" not in line]
    assert status == 2 and len(lines) == 1 and message in lines[0], lines


# --- Texts ------------------------------------------------------------------------------------------------------------


def test_built_in_texts_equal_the_demo_corpus() -> None:
    assert gzip.decompress(texts.BUILT_IN.read_bytes()).decode() == calibration.lines()


def test_texts_are_read_from_every_kind_of_record(tmp_path: Path) -> None:
    tokenizer = Tokenizer(demo.CHAT)
    records = [
        {"text": "A tiger."},
        {"messages": [{"role": "user", "content": "A lion?"}, {"role": "assistant", "content": "Yes."}]},
        {"prompt": "A wolf", "response": " ran."},
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(record) + "\n\n" for record in records))
    (tmp_path / "array.json").write_text(json.dumps(records, indent=1))
    for name in ("lines.jsonl", "array.json"):
        (samples,) = texts.read_samples(str(tmp_path / name), tokenizer, 9, 4096, 3).tolist()
        text = tokenizer.decode(samples, skip_special_tokens=False)
        assert "A tiger." in text and "<|im_start|>user\nA lion?<|im_end|>" in text and "A wolf ran." in text
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "One.\u2028Two.\x85Three."}, ensure_ascii=False))
    (samples,) = texts.read_samples(str(tmp_path / "lines.jsonl"), tokenizer, 9, 4096, 3).tolist()
    assert tokenizer.decode(samples) == "One.\u2028Two.\x85Three."
    (tmp_path / "plain.txt").write_text("".join(f"Line {number} of many.\n" for number in range(2000)))
    first, second = (texts.read_samples(str(tmp_path / "plain.txt"), tokenizer, 9, 64, seed) for seed in (0, 1))
    assert first.shape == (9, 64) and not torch.equal(first, second)
    assert torch.equal(first, texts.read_samples(str(tmp_path / "plain.txt"), tokenizer, 9, 64, 0))
    calibrated, measured = texts.split_samples(first, 100, 3)
    assert (len(calibrated), len(measured)) == (8, 1) and not any(
        (calibrated == each).all(1).any() for each in measured
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{", "line 1 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'{"text": 1}', "record 1 of .*a.jsonl has no valid field of text, messages, prompt"),
        ("a.jsonl", b'{"messages": ["x"]}', "has no valid field of text, messages, prompt"),
        ("a.jsonl", b'{"messages": [{"role": 3}]}', "the chat template cannot render a record"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.txt", b"", "has fewer than 2 tokens of text"),
        ("a.parquet", b"PAR1", "pyarrow|cannot be read as Parquet"),
    ],
)
def test_unreadable_texts_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PenstockError, match=message):
        texts.read_samples(str(tmp_path / name), Tokenizer(demo.CHAT), 4, 64, 0)
