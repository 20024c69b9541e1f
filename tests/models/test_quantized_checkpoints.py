"""Quantized checkpoints: weights compared with the formats' definitions, models with transformers on these weights."""

from __future__ import annotations

import json
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import save
from quantized import KINDS, SIZES, ct_config, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from penstock import ops
from penstock.checkpoint.stored_format import quantization_config_of
from penstock.core import PenstockError, SamplingParams
from penstock.core.quantization import SCHEMES, Format
from penstock.frontend.llm import LLM
from penstock.layers import BuildContext
from penstock.models import read_config
from penstock.models.weights import Checkpoint
from penstock.ops import QuantizedWeight
from penstock.parallel import SINGLE_RANK, Shard, shard_outputs
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import model_size_of
from penstock.quant import Matrix, fp8, read_quantization_config

CPU = torch.device("cpu")
MATRICES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_quantization_config(read_config(folder).quantization_config))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_weights_equal_format_definition(kind: str, tmp_path: Path) -> None:
    """The bits are equal, also if only a range of the outputs is read."""
    model = quantize(tmp_path, KINDS[kind])
    checkpoint, found = open_checkpoint(tmp_path), 0
    for name, expected in model.state_dict().items():
        matrix = name.removesuffix(".weight")
        if not checkpoint.format_of(matrix).bits:
            continue

        def read(first: int, end: int, matrix: str = matrix, expected: Tensor = expected) -> Tensor:
            weight = checkpoint.read_quantized(matrix, *expected.shape, (first, end))
            return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight

        found += 1
        outputs = len(expected)
        assert torch.equal(read(0, outputs), expected)
        for first, end in ((0, 8), (outputs // 2, outputs), (5, 21)):
            assert torch.equal(read(first, end), expected[first:end])
    assert found == 14


@pytest.mark.parametrize(
    ("kind", "file"),
    [(kind, "quantize_config.json") for kind in KINDS if kind.startswith(("awq", "gptq"))]
    + [(kind, "quant_config.json") for kind in KINDS if kind.startswith("awq")],
)
def test_quantization_files_of_autogptq_and_autoawq_are_read(kind: str, file: str, tmp_path: Path) -> None:
    quantize(tmp_path, KINDS[kind])
    expected = {name: open_checkpoint(tmp_path).format_of(name) for name in MATRICES}
    config = json.loads((tmp_path / "config.json").read_text())
    given = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del given["quant_method"]
    (tmp_path / file).write_text(json.dumps(given))
    assert read_config(tmp_path).quantization_config == {"quant_method": kind.split()[0], **given}
    assert {name: open_checkpoint(tmp_path).format_of(name) for name in MATRICES} == expected
    (tmp_path / file).write_text("[")
    with pytest.raises(PenstockError, match=f"{file} is not JSON"):
        read_config(tmp_path)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("in_config", [False, True])
def test_fp8_checkpoint_of_model_optimizer_matches_transformers(in_config: bool, tmp_path: Path) -> None:
    """The checkpoint has one scale per matrix; input scales are ignored. ``hf_quant_config.json`` or ``config.json``
    names the algorithm."""
    model = save(LlamaConfig(**SIZES), tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        tensors[name] = tensor
        if "_proj" in name:
            values, scale = fp8.pack(tensor.float(), 0, 0)
            tensors |= {name: values, f"{name}_scale": scale[0, 0]}
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
            model.get_parameter(name).data = values.float() * scale
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}

    def describe(**changed: Any) -> None:
        if in_config:
            content = config | {"quantization_config": {"quant_method": "modelopt", **described, **changed}}
            (tmp_path / "config.json").write_text(json.dumps(content))
        else:
            content = {"producer": {"name": "modelopt"}, "quantization": described | changed}
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))

    describe()
    llm = LLM(tmp_path, dtype="float32", block_size=16, num_gpu_blocks_override=50, weight_cache_dir="none")
    prompt = PROMPTS[-1]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [entry.logprob for token in output.prompt_logprobs[1:] for entry in token.values()]
    with torch.inference_mode():
        logprobs = model.float()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    torch.testing.assert_close(torch.tensor(found), logprobs[range(len(prompt) - 1), prompt[1:]], atol=1e-3, rtol=0)
    describe(quant_algo="W4A8_AWQ")
    with pytest.raises(PenstockError, match=r"quant_algo 'W4A8_AWQ' of Model Optimizer is not supported; use an FP8"):
        read_config(tmp_path)


def draw(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


PROMPTS = [draw(length, length) for length in (1, 7, 40)]


def rounded(x: Tensor, kind: str, group: int) -> Tensor:
    """Activations rounded to 8 bits, scaled by the largest magnitude of each row, or of each group of a row."""
    groups = x.unflatten(-1, (-1, min(group, x.shape[-1]))) if group else x[..., None, :]
    largest = groups.abs().amax(-1, keepdim=True)
    if kind == "int8":
        return ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2)
    return ((groups * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)).flatten(-2)


ON_CPU = ["awq g32", "gptq asymmetric, act-order, v2", "compressed-tensors w8a8", "compressed-tensors w8a8 asymmetric"]
ON_CPU += ["fp8 blocks", "bitsandbytes nf4", "bitsandbytes int8"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "reference") for kind in KINDS), *((kind, "cpu") for kind in ON_CPU)]
)
def test_quantized_model_matches_transformers_on_dequantized_weights(kind: str, backend: str, tmp_path: Path) -> None:
    """Compares greedy tokens and log probabilities in float32. If the backend multiplies the stored integers with 8-bit
    activations, the activations of transformers are rounded in the same way."""
    if backend == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    model = quantize(tmp_path, KINDS[kind])
    format = open_checkpoint(tmp_path).format_of("model.layers.0.mlp.up_proj")
    rounds_activations = format.activation_bits and ops.backend(CPU, backend).supports(format, torch.float32)
    if rounds_activations:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, x: (rounded(x[0], *KINDS[kind].activations),))
    llm = LLM(tmp_path, ops=backend, dtype="float32", block_size=16, num_gpu_blocks_override=50)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    differences = []
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        (completion,) = output.outputs
        with torch.inference_mode():
            table = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
        if not rounds_activations:
            assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids
        reported = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        found = [
            (row[token_id], entry.logprob)
            for row, position in zip(table, reported, strict=False)
            for token_id, entry in (position or {}).items()
        ]
        differences += [abs(float(expected) - logprob) for expected, logprob in found]
    assert len(differences) > 90
    if rounds_activations:  # values halfway between two integers may be rounded differently, which changes later values
        assert sum(differences) / len(differences) < 0.03
    else:
        assert max(differences) < 1e-4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["awq g32", "gptq asymmetric, act-order, v2", "compressed-tensors w8a16 channel"])
def test_quantized_lm_head_in_bfloat16_is_as_accurate_as_transformers(kind: str, tmp_path: Path) -> None:
    """The kernels multiply the stored integers and take the argmax."""
    model = quantize(tmp_path, replace(KINDS[kind], skip=()), LlamaConfig(**SIZES | {"vocab_size": 320}))
    assert open_checkpoint(tmp_path).format_of("lm_head").bits
    llm = LLM(tmp_path, dtype="bfloat16", block_size=16, num_gpu_blocks_override=50, weight_cache_dir="none")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(PROMPTS[-1:], params, use_tqdm=False)
    reported = torch.tensor(
        [entry.logprob for position in (output.prompt_logprobs or [])[1:] for entry in (position or {}).values()]
    )
    rough = deepcopy(model).bfloat16()
    with torch.inference_mode():
        exact, theirs = (
            each(torch.tensor(PROMPTS[-1:])).logits[0].float().log_softmax(-1)[range(39), PROMPTS[-1][1:]]
            for each in (model, rough)
        )
        best = model(torch.tensor(PROMPTS[-1:])).logits[0, -1]
    assert (reported - exact).norm() <= 1.5 * (theirs - exact).norm()
    (token,) = output.outputs[0].token_ids
    assert best[token] > best.max() - 0.5


def generated(folder: Path, **options: Any) -> list[Any]:
    """Greedy tokens and log probabilities of ``PROMPTS``."""
    llm = LLM(folder, **{"block_size": 16, "num_gpu_blocks_override": 50, "weight_cache_dir": "none"} | options)
    with closing(llm.engine):
        return answers(llm)


def answers(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, repr(output.outputs[0].logprobs)) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["awq g32", "bitsandbytes nf4"])
def test_two_ranks_generate_the_same_as_one(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    quantize(tmp_path, KINDS[kind])
    assert generated(tmp_path, tensor_parallel_size=2) == generated(tmp_path)


def test_rank_split_within_multiplied_blocks_is_refused(tmp_path: Path) -> None:
    """A backend that dequantizes the blocks may split them anywhere."""
    model = quantize(tmp_path, KINDS["fp8 blocks"])
    name, shard = "model.layers.0.mlp.up_proj", Shard(48, 96, 96)

    def matrix(backend: str) -> Matrix:
        context = BuildContext(ops.backend(CPU, backend), open_checkpoint(tmp_path), torch.float32, CPU, 64)
        return context.matrix([name], 64, [shard], Format())

    with pytest.raises(PenstockError, match=r"tensor_parallel_size: splits .*up_proj within a block of 32 outputs"):
        matrix("reference")
    pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    found = matrix("cpu").linear(torch.eye(64))
    torch.testing.assert_close(found, model.state_dict()[f"{name}.weight"][48:].T, rtol=0, atol=0)


@pytest.mark.slow
def test_float16_checkpoint_generates_the_same_from_weight_cache(tmp_path: Path) -> None:
    """CPUs compute a float16 checkpoint in bfloat16."""
    quantize(tmp_path, KINDS["gptq asymmetric, act-order, v2"])
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"float16"'))
    first = generated(tmp_path, weight_cache_dir=str(tmp_path / "cache"))
    assert generated(tmp_path, weight_cache_dir=str(tmp_path / "cache")) == first == generated(tmp_path)


@pytest.mark.parametrize(
    ("kind", "quantization", "kept"),
    [
        ("gptq", "w4a8", True),
        ("awq g32", "wint4", True),
        ("awq g32", "w8a8", False),
        ("compressed-tensors w8a8", "wint8", True),
        ("gptq 8 bits, act-order", "w8a8", True),
        ("bitsandbytes int8", "w8a8", True),
        ("fp8 blocks", "w8a8", False),
        ("bitsandbytes nf4", "w4a8", False),
    ],
)
def test_quantization_option_keeps_stored_integers_of_equal_bits(
    kind: str, quantization: str, kept: bool, tmp_path: Path
) -> None:
    """A scheme with the checkpoint's number of bits keeps the stored integers and sets only the activations. Other
    schemes round the weights as in an unquantized checkpoint."""
    model = quantize(tmp_path, KINDS[kind])
    scheme = SCHEMES[quantization]
    context = BuildContext(
        ops.backend(CPU, "reference"), open_checkpoint(tmp_path), torch.bfloat16, CPU, 64, scheme=scheme
    )
    name = "model.layers.1.mlp.down_proj"
    matrix = context.matrix([name], 96, [shard_outputs(SINGLE_RANK, 64)], scheme.layers)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = model.state_dict()[f"{name}.weight"]
    if not kept:
        weight = weight.bfloat16()
        expected = ops.reference.linear(x, ops.reference.pack([weight], None, scheme.layers))
    else:
        size = context.weights.format_of(name).group_size  # activations have the same group size
        given = rounded(x.float(), "int8", size) if scheme.layers.activation_bits else x.float()
        expected = torch.nn.functional.linear(given, weight).bfloat16()
    torch.testing.assert_close(matrix.linear(x), expected)
    assert [layers for _, layers in context.dequantized_bytes] == ([] if kept else [scheme.layers])


@pytest.mark.slow
def test_update_weights_accepts_other_quantization_formats(tmp_path: Path) -> None:
    folders = {}
    for number, kind in enumerate(("awq g32", "gptq asymmetric", "compressed-tensors w8a8")):
        folders[kind] = tmp_path / kind
        folders[kind].mkdir()
        quantize(folders[kind], KINDS[kind], seed=number)
    plain = folders["plain"] = tmp_path / "plain"
    plain.mkdir()
    save(LlamaConfig(**SIZES), plain)
    first, *others = folders.values()
    llm = LLM(first, block_size=16, num_gpu_blocks_override=50, weight_cache_dir="none", dtype="bfloat16")
    before = answers(llm)
    for folder in others:
        llm.update_weights(folder)
        assert answers(llm) == generated(folder, dtype="bfloat16")
    llm.update_weights(load_file(plain / "model.safetensors"))
    assert answers(llm) == generated(plain, dtype="bfloat16")
    llm.update_weights(first)
    assert answers(llm) == before


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "exl3"}, "quant_method 'exl3' .* supported are awq"),
    ({"quant_method": "awq", "version": "gemv"}, "AWQ in the layout 'gemv'"),
    ({"quant_method": "awq", "version": "gemv_fast"}, "AWQ in the layout 'gemv_fast'"),
    ({"quant_method": "awq", "backend": "llm-awq"}, "AWQ in the layout 'llm-awq'"),
    ({"quant_method": "awq", "bits": 8}, "AWQ in 8 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_p"}, "GPTQ in the layout 'gptq_p'"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin'"),
    ({"quant_method": "gptq", "bits": 5}, "GPTQ in 5 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size .* is 0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 20}, "groups of 20 inputs"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype int64"),
    ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 8}}, "GPTQ with adapter"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, "an invalid regular expression"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"(a+)+$": {}}}, "nested repetitions, or more than 5"),
    (ct_config("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}), "groups of 16"),
    (ct_config("mxfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "format 'mxfp4-pack-quantized'"),
    (ct_config("float-quantized", {"num_bits": 6, "type": "float"}), "6-bit floating-point numbers"),
    (ct_config("dense", {}), "format 'dense'"),
    (ct_config("int-quantized", {"strategy": "block"}), "integer strategy 'block'"),
    (ct_config("pack-quantized", {}) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
    (ct_config("pack-quantized", {}) | {"transform_config": {"a": 1}}, "transform_config"),
    (ct_config("pack-quantized", {}) | {"config_groups": {}}, "none of them with a weights scheme"),
    ({"quant_method": "fp8", "activation_scheme": "per_head"}, "activation_scheme 'per_head'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "-1; it must be an integer from 1"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "bitsandbytes in 'af4'"),
    ({"quant_method": "bitsandbytes"}, "must set exactly one of load_in_4bit"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_unsupported_quantization_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The checkpoint has only ``config.json``, and no weights."""
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(PenstockError, match=message):
        read_config(tmp_path)


def test_notes_name_differences_from_the_scheme() -> None:
    kinds = ("compressed-tensors w8a8 static", "fp8 one scale", "bitsandbytes int8", "compressed-tensors w8a8")
    expected_notes = ("per token", "per token", "outliers", "")
    for kind, expected in zip(kinds, expected_notes, strict=True):
        notes = " ".join(read_quantization_config(KINDS[kind].config).notes)
        assert expected in notes if expected else not notes
    config = KINDS["compressed-tensors w8a8"].config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert "--kv-cache-dtype" in " ".join(read_quantization_config(config).notes)


def test_each_module_gets_its_quantization_scheme(tmp_path: Path) -> None:
    """compressed-tensors selects the scheme by the module's name, or by a pattern, or by the module's class; ignored
    modules keep their dtype. ``compression_config`` is an early name. GPTQ has settings per module (``dynamic``)."""
    kinds = [
        KINDS["compressed-tensors w4a16"],
        KINDS["compressed-tensors w8a8"],
        KINDS["compressed-tensors fp8 channel"],
    ]
    groups = [deepcopy(kind.config["config_groups"]["group_0"]) for kind in kinds]
    for group, kind in zip(groups, kinds, strict=True):
        group["format"] = kind.config["format"]
    groups[1]["targets"] = ["re:.*self_attn.*", "model.layers.1.mlp.up_proj"]
    groups[2]["targets"] = [r"re:.*layers\.1\.mlp\.(up|gate)_proj$"]
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["re:.*lm_head"]}
    config["config_groups"] = {f"group_{number}": group for number, group in enumerate(groups)}
    whole = {"config_groups": config["config_groups"], **config}
    format = read_quantization_config(whole)
    source = Names({f"{name}.weight_scale" for name in ("q", "model.layers.0.self_attn.k_proj")})
    source.names |= {f"model.layers.1.mlp.{name}_proj.weight_scale" for name in ("up", "gate", "down")}

    def found(name: str) -> tuple[int, int, bool]:
        stored = format.format_of(source, name)
        return stored.bits, stored.activation_bits, stored.floating

    assert found("model.layers.0.self_attn.k_proj") == (8, 8, False)
    assert found("model.layers.1.mlp.up_proj") == (8, 8, False)
    assert found("model.layers.1.mlp.gate_proj") == (8, 8, True)
    assert found("model.layers.1.mlp.down_proj") == (4, 0, False)
    assert found("lm_head") == (0, 0, False)
    early = {"compression_config": {"quantization_config": whole, "sparsity_config": {"format": "dense"}}}
    assert read_quantization_config(quantization_config_of(early)).format_of(source, "q") == Format(4, 32)

    dynamic = {r"-:.*lm_head": {}, r"+:.*\.1\..*": {"bits": 8, "sym": False}, r".*up_proj": {"group_size": 64}}
    gptq = read_quantization_config({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic})
    source = Names({f"model.layers.{layer}.up_proj.qweight" for layer in range(2)} | {"a.qweight"})
    assert gptq.format_of(source, "model.layers.1.up_proj") == Format(8, 32, asymmetric=True)
    assert gptq.format_of(source, "model.layers.0.up_proj") == Format(4, 64)
    assert gptq.format_of(source, "a") == Format(4, 32)
    assert gptq.format_of(source, "lm_head") == Format()


class Names:
    """A ``TensorSource`` with names of tensors, and without data."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def has(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        return (1,)

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        raise AssertionError(name)


@pytest.mark.parametrize(("kind", "bits"), [("awq g32", 6), ("gptq", 4.5), ("compressed-tensors w8a8", 8.5)])
def test_planned_weight_bytes_count_scales_and_offsets(kind: str, bits: float, tmp_path: Path) -> None:
    """Scales of 4 bits without offsets are counted as float16, other scales and offsets as float32."""
    quantize(tmp_path, KINDS[kind])
    size = model_size_of(json.loads((tmp_path / "config.json").read_text()))
    layers = size.layer_weights * bits / 8
    assert weight_bytes(size, dtype="bfloat16") == pytest.approx(layers + size.embedding_weights * 2)
