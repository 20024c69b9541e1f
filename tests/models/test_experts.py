"""Mixture of experts with random weights: kernels compared with the reference ops, families with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from quantized import KINDS, as_array, bfloat16_array
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from penstock.calibration.options import QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.core import PenstockError, SamplingParams
from penstock.core.quantization import SCHEMES, Format
from penstock.frontend.llm import LLM
from penstock.frontend.outputs import RequestOutput
from penstock.ops import QuantizedWeight, Routing, reference

cpu: Any = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
kernels: Any = cpu._kernels

FORMATS = {name: scheme.layers for name, scheme in SCHEMES.items() if not scheme.layers.floating}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


# function scope restores the default instruction set, which the engine processes of other tests use
@pytest.fixture(params=kernels.available())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.current()
    kernels.use(request.param)
    cpu.set_threads(2)
    yield
    kernels.use(before)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ROUTINGS = {
    "softmax": Routing(2),
    "renormalized": Routing(4, renormalize=True),
    "sigmoid, groups": Routing(3, "sigmoid", True, 1e-20, 2.5, groups=4, top_groups=2, group_score="two best"),
    "softmax, groups": Routing(3, scale=16.0, groups=4, top_groups=2),
    "sum": Routing(12, "sigmoid", True, 1e-12),
    "added sum": Routing(4, "sigmoid", True, added_sum=0.3),
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_router_matches_reference(instruction_set: None, routing: Routing, with_bias: bool) -> None:
    logits, bias = randn(0, 70, 12), randn(1, 12) if with_bias else None
    logits[5] = 0.5  # ties: the lowest ids are chosen
    for factors in (None, randn(2, 12)):
        ids, weights = cpu.select_experts(logits, routing, bias, factors)
        expected = reference.select_experts(logits, routing, bias, factors)
        if routing.top_groups == routing.groups or with_bias:
            assert torch.equal(ids, expected[0])
        rows = slice(6, None)  # if groups tie, the reference may choose other groups
        assert torch.equal(ids[rows], expected[0][rows])
        torch.testing.assert_close(weights[rows], expected[1][rows], atol=1e-6, rtol=1e-5)


def test_router_chooses_valid_experts_for_nan_and_infinite_logits(instruction_set: None) -> None:
    logits = randn(0, 6, 16)
    logits[0], logits[1, 3], logits[2], logits[3] = float("nan"), float("nan"), float("inf"), float("-inf")
    for routing in ROUTINGS.values():
        ids, _ = cpu.select_experts(logits, routing)
        assert all(len(set(row)) <= routing.top_k and 0 <= min(row) <= max(row) < 16 for row in ids.tolist())


def layer(ops: Any, pack: Callable[[Any, int], Any], sizes: tuple[int, int, int], first: int = 0, end: int = -1) -> Any:
    """Stacked gate-up and stacked down matrices of the experts ``[first, end)``; ``end`` -1: to the last expert."""
    experts, hidden, intermediate = sizes
    own = range(experts)[first : end if end >= 0 else None]
    gate_up = [pack(randn(2 * e, 2 * intermediate, hidden) * hidden**-0.5, e) for e in own]
    down = [pack(randn(2 * e + 1, hidden, intermediate) * intermediate**-0.5, e) for e in own]
    return ops.stack_experts(gate_up, first), ops.stack_experts(down, first)


def compute(ops: Any, x: Tensor, matrices: Any, ids: Tensor, weights: Tensor, *shared: Tensor) -> Tensor:
    gate_up, down = matrices
    outputs = ops.experts_linear(ops.experts_activation_and_mul(x, gate_up, ids, "silu"), down, ids)
    result: Tensor = ops.combine_experts(outputs, weights, *shared)
    return result


@pytest.mark.slow_after(11)
@pytest.mark.parametrize(("name", "dtype"), [(name, torch.bfloat16) for name in FORMATS] + [("none", torch.float32)])
def test_experts_match_reference_and_do_not_depend_on_the_batch(
    instruction_set: None, name: str, dtype: torch.dtype
) -> None:
    format = FORMATS[name]
    for tokens, sizes, top_k in ((1, (8, 96, 64), 2), (40, (16, 130, 40), 4), (230, (5, 70, 128), 3)):
        x = randn(3, tokens, sizes[1], dtype=dtype)
        ids, weights = cpu.select_experts(randn(4, tokens, sizes[0]), Routing(top_k))
        shared, gate = randn(5, tokens, sizes[1], dtype=dtype), randn(6, tokens, 1)

        def build(ops: Any, own_sizes: tuple[int, int, int] = sizes) -> Any:
            return layer(ops, lambda weight, _: ops.pack([weight.to(dtype)], None, format), own_sizes)

        matrices = build(cpu)
        got, expected = (
            compute(ops, x, own, ids, weights, shared, gate)
            for ops, own in ((cpu, matrices), (reference, build(reference)))
        )
        torch.testing.assert_close(got, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
        for first, end in ((0, 1), (tokens // 2, tokens), (tokens // 3, tokens // 3 + 7)):
            rows = slice(first, end)
            part = compute(cpu, x[rows], matrices, ids[rows], weights[rows], shared[rows], gate[rows])
            assert torch.equal(part, got[rows])


STORED_FORMATS = (
    *(Format(4, 32, asymmetric=True), Format(4, 32, 8, asymmetric=True), Format(8), Format(4, 32, floating=True)),
    Format(4, 32, 8, asymmetric=True, activation_groups=True),
)


@pytest.mark.parametrize("format", STORED_FORMATS, ids=str)
def test_experts_with_stored_formats_match_reference(instruction_set: None, format: Format) -> None:
    """The experts have offsets, and every other expert has reordered inputs."""
    sizes = 6, 96, 64
    x = randn(3, 50, 96, dtype=torch.bfloat16)
    ids, weights = cpu.select_experts(randn(4, 50, 6), Routing(2))

    def pack(ops: Any) -> Callable[[Tensor, int], Any]:
        def packed(weight: Tensor, expert: int) -> Any:
            generator, (outputs, inputs) = torch.Generator().manual_seed(expert), weight.shape
            limit, groups = 1 << (format.bits - 1), -(-inputs // (format.group_size or inputs))
            values = torch.randint(-limit, limit, (outputs, inputs), generator=generator).to(torch.int8)
            scales, offsets = (torch.randn(outputs, groups, generator=generator) / limit / 8 for _ in range(2))
            order = torch.randperm(inputs, generator=generator) if expert % 2 else None
            given = QuantizedWeight(values, scales, format, offsets if format.asymmetric else None, order)
            return ops.pack_quantized([given], torch.bfloat16)

        return packed

    got, expected = (compute(ops, x, layer(ops, pack(ops), sizes), ids, weights) for ops in (cpu, reference))
    torch.testing.assert_close(got, expected, atol=5e-2, rtol=5e-2)


def test_rank_computes_only_its_experts(instruction_set: None) -> None:
    """Output rows of other experts are left unchanged."""
    sizes = 7, 64, 64
    x, (ids, _) = randn(3, 30, 64), cpu.select_experts(randn(4, 30, 7), Routing(3))

    def pack(weight: Tensor, expert: int) -> Any:
        return cpu.pack([weight])

    whole = cpu.experts_activation_and_mul(x, layer(cpu, pack, sizes)[0], ids, "silu")
    merged = torch.full_like(whole, 7)
    for first, end in ((0, 3), (3, 7)):
        cpu.experts_activation_and_mul(x, layer(cpu, pack, sizes, first, end)[0], ids, "silu", merged)
    assert torch.equal(merged, whole)
    reference_out = torch.full_like(whole, 7)
    own = reference.stack_experts([reference.pack([randn(2 * e, 128, 64) * 64**-0.5]) for e in range(3, 7)], 3)
    reference.experts_activation_and_mul(x, own, ids, "silu", reference_out)
    assert bool((reference_out[ids < 3] == 7).all())
    torch.testing.assert_close(reference_out[ids >= 3], whole[ids >= 3], atol=1e-5, rtol=1e-5)


def test_experts_are_placed_on_replicas_and_counted() -> None:
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2]])
    places = torch.tensor([[1, 4, 0, 0], [1, 1, 0, 0], [3, 0, 2, 3]])
    for ops in (cpu, reference):
        assert torch.equal(ops.place_experts(ids, places), torch.tensor([[4, 0], [2, 1], [3, 4], [1, 0]]))
        counts = torch.zeros(3, dtype=torch.int64)
        ops.count_experts(ids, counts)
        assert counts.tolist() == [2, 2, 4]
    reference.count_experts(ids, counts, torch.tensor([2], dtype=torch.int32))
    assert counts.tolist() == [3, 3, 6]


def test_experts_of_different_shapes_are_refused() -> None:
    with pytest.raises(PenstockError, match="differ in shape or format"):
        cpu.stack_experts([cpu.pack([randn(0, 64, 32)]), cpu.pack([randn(0, 64, 64)])])


SPARSE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SMALL, **SPARSE, num_local_experts=8, sliding_window=None),
    "qwen3-moe, norm, dense layers": Qwen3MoeConfig(
        **SMALL,
        moe_intermediate_size=64,
        num_experts_per_tok=4,
        num_local_experts=16,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        head_dim=32,
        sliding_window=None,
    ),
    "qwen3-moe, step": Qwen3MoeConfig(
        **SMALL,
        moe_intermediate_size=20,
        num_experts_per_tok=3,
        num_local_experts=5,
        decoder_sparse_step=2,
        sliding_window=None,
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
    "mixtral, window": MixtralConfig(**SMALL, num_local_experts=7, num_experts_per_tok=3, sliding_window=24),
    "qwen2-moe": Qwen2MoeConfig(**SMALL, **SPARSE, num_experts=8, shared_expert_intermediate_size=48),
    "qwen2-moe, norm, dense layers": Qwen2MoeConfig(
        **SMALL,
        **SPARSE,
        num_experts=8,
        norm_topk_prob=True,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0],
        qkv_bias=False,
    ),
    "qwen2-moe, one of five": Qwen2MoeConfig(
        **SMALL, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=20, shared_expert_intermediate_size=40
    ),
    "olmoe": OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3),
    "olmoe, norm": OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True),
    "glm-4.5": Glm4MoeConfig(**SMALL, **SPARSE, n_routed_experts=8, head_dim=32, use_qk_norm=True),
    "glm-4.5, groups, two shared": Glm4MoeConfig(
        **SMALL,
        **SPARSE,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=2,
        attention_bias=True,
        norm_topk_prob=False,
    ),
    "ernie-4.5": Ernie4_5_MoeConfig(**SMALL, moe_num_experts=8, moe_k=3, moe_intermediate_size=32),
    "ernie-4.5, interval": Ernie4_5_MoeConfig(
        **SMALL | {"num_hidden_layers": 4},
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "minimax-m2": MiniMaxM2Config(**SMALL, num_local_experts=8, num_experts_per_tok=2, head_dim=32, rotary_dim=16),
}
TIGHT = {"block_size": 16, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 50}
"""Options with chunked prefill, and with too few KV blocks for six sequences, so that some are preempted."""


FEW = ("qwen3-moe, step", "qwen2-moe", "glm-4.5, groups, two shared")


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, save_with_bias(CONFIGS[request.param], folder)


def save_with_bias(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Like ``save``, with router biases that are not zero."""
    model = save(config, folder)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(randn(len(name), *buffer.shape) / 4)
    model.save_pretrained(folder)
    return model


def draw(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


PROMPTS = [draw(length, length) for length in (1, 7, 40, 100, 200, 230)]


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
    return outputs


def tokens_and_logprobs(output: RequestOutput) -> list[Any]:
    """Generated tokens, followed by the log probabilities of each position."""
    (completion,) = output.outputs
    positions = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
    return [
        completion.token_ids,
        *([(token, found.logprob) for token, found in (row or {}).items()] for row in positions),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "ops"),
    [*((name, "cpu") for name in CONFIGS), *((name, "reference") for name in FEW)],
    indirect=["checkpoint"],
)
def test_family_matches_transformers(checkpoint: tuple[Path, PreTrainedModel], ops: str) -> None:
    """Penstock runs a batch, with chunks and preemption; transformers runs one sequence at a time."""
    folder, model = checkpoint
    for prompt, output in zip(PROMPTS, generate(LLM(folder, dtype="float32", ops=ops, **TIGHT)), strict=True):
        (completion,) = output.outputs
        with torch.inference_mode():
            table = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
        assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids
        for row, position in zip(table, tokens_and_logprobs(output)[1:], strict=False):
            for token, logprob in position:
                assert logprob == pytest.approx(row[token].item(), abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint", [FEW[0], pytest.param(FEW[1], marks=pytest.mark.thorough), FEW[2]], indirect=True
)
def test_outputs_do_not_depend_on_the_batch(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Tests unquantized and quantized weights."""
    folder, _ = checkpoint
    for quantization in ("none", "w4a8"):
        llm = LLM(folder, dtype="bfloat16", ops="cpu", quantization=quantization, weight_cache_dir="none", **TIGHT)
        together = [tokens_and_logprobs(output) for output in generate(llm)]
        assert [tokens_and_logprobs(generate(llm, [prompt])[0]) for prompt in PROMPTS] == together


def equalize_routers(model: PreTrainedModel) -> None:
    """Make the differences between the rows of each router too small for bfloat16, and its biases zero."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("gate.weight"):
            steps = torch.arange(len(tensor))[:, None] * 2.0**-11
            tensor.data = tensor.data[:1].bfloat16().float() * (1 + steps)
        elif name.endswith("e_score_correction_bias"):
            tensor.data.zero_()


DEEPSEEK = SMALL | {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FLOAT32_ROUTERS = {name: CONFIGS[name] for name in ("ernie-4.5", "glm-4.5", "minimax-m2")} | {
    "deepseek-v2": DeepseekV2Config(**DEEPSEEK, **SPARSE),
    "deepseek-v3": DeepseekV3Config(**DEEPSEEK, **SPARSE),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("config", "ops"), [*((name, "cpu") for name in FLOAT32_ROUTERS), ("ernie-4.5", "reference")])
def test_routers_of_bfloat16_model_compute_in_float32(config: str, ops: str, tmp_path: Path) -> None:
    """Tests families with float32 routers in transformers or, for MiniMax-M2, in the publisher's code. The routers
    choose the same experts as in the float32 model."""
    model = save(FLOAT32_ROUTERS[config], tmp_path)
    equalize_routers(model)
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = LLM(tmp_path, dtype="bfloat16", ops=ops, **TIGHT).generate([PROMPTS[3]], params, use_tqdm=False)
    rows = zip(output.prompt_logprobs[1:], PROMPTS[3][1:], strict=True)
    got = torch.tensor([row[token].logprob for row, token in rows])
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[3]])).logits[0].log_softmax(-1)[range(99), PROMPTS[3][1:]]
    assert (got - expected).abs().mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq asymmetric, act-order, v2", "awq g32", "compressed-tensors w8a8", "fp8 blocks"])
def test_quantized_experts_match_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    """Compares a checkpoint with quantized experts and one with the dequantized weights."""
    kind, generator = KINDS[name], torch.Generator().manual_seed(0)
    folders = tmp_path / "quantized", tmp_path / "plain"
    config = Qwen2MoeConfig(
        **SMALL | {"hidden_size": 128},
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        num_experts=4,
        shared_expert_intermediate_size=64,
    )
    for folder in folders:
        save(config, folder)
    stored = load_file(folders[0] / "model.safetensors")
    quantized, plain = {}, dict(stored)
    for tensor, weight in stored.items():
        matrix = tensor.removesuffix(".weight")
        if ".experts." not in tensor:
            quantized[tensor] = weight
            continue
        own = kind.tensors(generator, *weight.shape)
        arrays = {part: as_array(each) for part, each in own.items() if each.dtype != torch.bfloat16}
        arrays |= {part: bfloat16_array(part, own[part]) for part in own.keys() - arrays.keys()}
        plain[tensor] = torch.from_numpy(kind.weights(arrays, *weight.shape)).float()
        quantized |= {f"{matrix}.{part}": each.contiguous() for part, each in own.items()}
    for folder, tensors in zip(folders, (quantized, plain), strict=True):
        save_file(tensors, folder / "model.safetensors")
    path = folders[0] / "config.json"
    unquantized = [name.removesuffix(".weight") for name in stored if ".experts." not in name]
    given = kind.config | {"modules_to_not_convert": unquantized, "ignore": unquantized}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))
    found = [
        [logprob for row in tokens_and_logprobs(output)[1:] for _, logprob in row[:1]]
        for folder in folders
        for output in generate(LLM(folder, dtype="bfloat16", ops="cpu", **TIGHT), PROMPTS[3:4])
    ]
    got, expected = (torch.tensor(row[:99]) for row in found)  # log probabilities of the prompt
    assert (got - expected).abs().mean() < 0.2  # also with 8-bit activations; log probabilities are -8 on average


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe, norm, dense layers", "qwen2-moe, one of five", "ernie-4.5"])
def test_ranks_compute_the_same_bits_as_one(name: str, tmp_path: Path) -> None:
    """Tests tensor parallel experts (a shard of each expert per rank) and expert parallelism (whole experts)."""
    save(CONFIGS[name], tmp_path)
    quantization = "none" if name.startswith("qwen2") else "w4a8"
    options: dict[str, Any] = {"dtype": "bfloat16", "ops": "cpu", "quantization": quantization, **TIGHT}
    expected = [tokens_and_logprobs(output) for output in generate(LLM(tmp_path, **options))]
    for by_expert in (False, True):
        ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": by_expert, "expert_parallel_size": 2 * by_expert}
        llm = LLM(tmp_path, distributed_executor_backend="mp", **ranks, **options)
        assert [tokens_and_logprobs(output) for output in generate(llm)] == expected


def test_invalid_expert_parallel_size_is_refused(tmp_path: Path) -> None:
    save(CONFIGS["qwen3-moe"], tmp_path)
    with pytest.raises(PenstockError, match=r"expert_parallel_size: must be tensor_parallel_size \(2\)"):
        LLM(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True, expert_parallel_size=3)
    with pytest.raises(PenstockError, match="with enable_expert_parallel"):
        LLM(tmp_path, tensor_parallel_size=2, expert_parallel_size=2)


def test_experts_stored_in_one_tensor_compute_the_same_bits(tmp_path: Path) -> None:
    """One tensor per projection is the layout of transformers in memory."""
    save(CONFIGS["qwen3-moe"], tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "ops": "cpu", "quantization": "w8a8", **TIGHT}
    expected = [tokens_and_logprobs(output) for output in generate(LLM(tmp_path, **options))]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    fused: dict[str, list[Tensor]] = {}
    for name in sorted(name for name in tensors if ".experts." in name):
        layer, _, projection = name.removesuffix(".weight").partition(".experts.")
        number, _, projection = projection.partition(".")
        rows = fused.setdefault(f"{layer}.experts.{'down' if projection == 'down_proj' else 'gate_up'}_proj", [])
        if projection == "up_proj":
            rows[int(number)] = torch.cat((rows[int(number)], tensors.pop(name)))
        else:
            rows.append(tensors.pop(name))
    assert fused
    save_file(tensors | {name: torch.stack(experts) for name, experts in fused.items()}, file)
    assert [tokens_and_logprobs(output) for output in generate(LLM(tmp_path, **options))] == expected


@pytest.mark.slow
def test_gptq_calibrates_each_expert_on_its_inputs(tmp_path: Path) -> None:
    """GPTQ's error is below the error of rounding. Routers are not quantized; unused experts are rounded."""
    sizes = SMALL | {"vocab_size": 3584}
    save(Qwen3MoeConfig(**sizes, **SPARSE, num_local_experts=24, sliding_window=None), tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"A short text, number {i}, of {i * i} words." for i in range(40)))
    errors = {}
    for name, method, samples in (("gptq", "gptq", 32), ("rounded", "wint4", 32), ("few", "gptq", 1)):
        options = QuantizeOptions(
            method=method, group_size=32, calib_dataset=str(texts), calib_size=samples, calib_seq_len=20, eval_size=4
        )
        layer = quantize(tmp_path / "model", tmp_path / name, options, progress=False)["layers"][0]
        errors[name] = layer["error"]
        assert name != "few" or 0.0 in layer["matrices"].values()
        written = {each.removesuffix(".weight") for each in load_file(tmp_path / name / "model.safetensors")}
        assert "model.layers.0.mlp.gate" in written and "model.layers.0.mlp.experts.0.up_proj" not in written
        assert generate(LLM(tmp_path / name, dtype="bfloat16", ops="cpu", **TIGHT), PROMPTS[:2])
    assert errors["gptq"] < errors["rounded"]
