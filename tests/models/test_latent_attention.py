"""Multi-head latent attention: DeepSeek models compared with transformers, and kernels with the reference ops.

Results are bit-identical in any batch, across ranks and stages, and through a transfer buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import test_kv_export
import test_models
import test_prefill_decode
import torch
from checkpoints import SMALL, save
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model
from quantized import KINDS as KINDS_OF_CHECKPOINTS
from quantized import quantize
from same_bits import check_prefill_instance, check_random_engines, check_ranks_and_stages
from test_exactness import ADAPTERS
from test_ops import DTYPES, KV_QUANTIZATIONS, NAMES, assert_close, cpu, draw_batch, kernels, randn, seeds
from test_speculation import check_heads, with_head
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.core import PenstockError
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.models.loader import LoadOptions, load_model
from penstock.ops import AttentionMetadata, KVSpec, backend, reference
from penstock.planning.kv_size import bytes_per_weight, kv_specs
from penstock.planning.model_size import model_size_of

LATENT = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "first_k_dense_replace": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}
CONFIGS: dict[str, PreTrainedConfig] = {
    "v3": DeepseekV3Config(**LATENT),
    "v3, biases, yarn": DeepseekV3Config(**LATENT, **SCALED, attention_bias=True),
    "v3, halves rotated": DeepseekV3Config(**LATENT | {"q_lora_rank": None}, rope_interleave=False),
    "v2, biases": DeepseekV2Config(**LATENT, attention_bias=True, mlp_bias=True),
    "v2, yarn, tied": DeepseekV2Config(**LATENT | {"q_lora_rank": None, "tie_word_embeddings": True}, **SCALED),
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
CONFIGS |= {
    "v3, experts, yarn": DeepseekV3Config(**LATENT | EXPERTS, **SCALED),
    "v2, experts, biases": DeepseekV2Config(**LATENT | EXPERTS, attention_bias=True, mlp_bias=True),
    "v2, experts in groups": DeepseekV2Config(**LATENT | EXPERTS, topk_method="group_limited_greedy"),
}
CPU = torch.device("cpu")

# Tests and fixtures of other modules that also run for DeepSeek models and latent KV caches:
ops = test_models.ops
test_logprobs_and_greedy_tokens_match_transformers = test_models.test_logprobs_and_greedy_tokens_match_transformers
test_bfloat16_error_is_near_that_of_transformers = test_models.test_bfloat16_error_is_near_that_of_transformers
export_ops = test_kv_export.ops
secret = test_prefill_decode.secret


def save_with_bias(config: PreTrainedConfig, folder: Path) -> Any:
    """Like ``save``, with random router biases, which are buffers, not parameters."""
    model = save(config, folder)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, ops: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_with_bias(CONFIGS[request.param], folder)
    options = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100, "max_num_batched_tokens": 50}
    return LLM(folder, ops=ops, **options), model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with adapters, for the tests of ``test_exactness``."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_with_bias(CONFIGS["v3, experts, yarn"], folder)
    for rank, name in enumerate(ADAPTERS, 3):
        targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
        for weight in adapted.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        adapted.save_pretrained(folder / name)
        model = adapted.unload()
    return folder


# --- Kernels ---------------------------------------------------------------------------------------------------------


# function scope restores the default instruction set, which the engine processes of other tests use
@pytest.fixture(params=kernels.available())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.current()
    kernels.use(request.param)
    cpu.set_threads(2)
    yield
    kernels.use(before)


def draw_spec(rng: Random, dtype: torch.dtype, block_size: int, quantization: str) -> tuple[KVSpec, int]:
    """A random KV spec, at most as large as DeepSeek-V3's, and the size of its rotary part."""
    latent, rope = rng.choice(((16, 16), (32, 16), (48, 32), (512, 64)))
    return KVSpec(1, latent + rope, NAMES[dtype], block_size, quantization, latent=latent), rope


def store(ops: Any, cache: Any, vectors: Tensor, rope: int, slots: Tensor, pairs: bool = True) -> Tensor:
    """Store vectors at position 0, where rotation changes nothing."""
    table, none = (
        torch.cat((torch.ones(rope // 2), torch.zeros(rope // 2)))[None],
        vectors.new_zeros(len(vectors), 1, rope),
    )
    positions, out = torch.zeros(len(vectors), dtype=torch.int64), torch.empty_like(none)
    latent, k = vectors[:, :-rope], vectors[:, -rope:]
    ops.latent_rope_and_store(none, k, latent, positions, table, cache, slots, pairs, out)
    return out


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_latent_attention_matches_reference(seed: int) -> None:
    """A row alone, in blocks of another size, has the same bits as in the batch."""
    rng = Random(seed)
    dtype, block_size, heads = rng.choice(DTYPES), 16 * rng.randint(1, 5), rng.randint(1, 40)
    spec, rope = draw_spec(rng, dtype, block_size, rng.choice(KV_QUANTIZATIONS))
    batch, tokens, blocks = draw_batch(rng, block_size, rng.randint(1, 3))
    ours, theirs = (ops.new_kv_cache([spec], blocks, CPU)[0] for ops in (cpu, reference))
    other = cpu.new_kv_cache([replace(spec, block_size=64)], 3, CPU)[0]
    for cache in (ours, other):
        cache.data.fill_(255)  # bytes of 255 are NaN
    q = randn(seed, tokens, heads, spec.head_dim, dtype=dtype)
    scale, starts = spec.head_dim**-0.5, batch.attention.query_start_loc.tolist()
    rows = []
    for i, length in enumerate(batch.attention.seq_lens.tolist()):
        at = torch.arange(length)
        vectors = randn(rng.getrandbits(31), length, spec.head_dim, dtype=dtype)
        slots = batch.attention.block_tables[i].long()[at // block_size] * block_size + at % block_size
        for ops, cache in ((cpu, ours), (reference, theirs)):
            store(ops, cache, vectors, rope, slots, rng.random() < 0.5)
        row = rng.randrange(starts[i], starts[i + 1])
        store(cpu, other, vectors, rope, at)
        alone = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=batch.positions[row : row + 1].int() + 1,
            block_tables=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        )
        rows.append((row, cpu.latent_attention(q[row : row + 1], other, alone, scale, spec.latent)[0]))
    got = cpu.latent_attention(q, ours, batch.attention, scale, spec.latent)
    expected = reference.latent_attention(q, theirs, batch.attention, scale, spec.latent)
    if spec.quantization:
        error = (got - expected).float()
        assert error.square().mean() < 4e-4 * expected.float().square().mean()
    else:
        assert_close(got, expected.contiguous())
    for row, result in rows:
        assert torch.equal(result, got[row])


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_latent_attention_does_not_depend_on_the_number_of_threads(seed: int) -> None:
    """The threads share the positions of long sequences. A row alone also has the same bits."""
    rng = Random(seed)
    dtype, heads, new = rng.choice(DTYPES), rng.choice((4, 16, 50)), rng.choice((1, 1, 30))
    spec, rope = draw_spec(rng, dtype, 64, rng.choice(KV_QUANTIZATIONS))
    lengths = [rng.randint(new, 1700) for _ in range(rng.choice((1, 1, 2)))]
    ours, theirs = (ops.new_kv_cache([spec], 27 * len(lengths), CPU)[0] for ops in (cpu, reference))
    tables = torch.randperm(27 * len(lengths)).int().view(-1, 27)
    for table, length in zip(tables, lengths, strict=True):
        at = torch.arange(length)
        vectors = randn(rng.getrandbits(31), length, spec.head_dim, dtype=dtype)
        for ops, cache in ((cpu, ours), (reference, theirs)):
            store(ops, cache, vectors, rope, table.long()[at // 64] * 64 + at % 64)
    q, scale = randn(seed, new * len(lengths), heads, spec.head_dim, dtype=dtype), spec.head_dim**-0.5
    starts = torch.arange(0, len(q) + 1, new).int()
    metadata, before = AttentionMetadata(starts, torch.tensor(lengths).int(), tables), kernels.threads()
    try:
        got = []
        for threads in (1, 2, 5):
            cpu.set_threads(threads)
            got.append(cpu.latent_attention(q, ours, metadata, scale, spec.latent))
        row = rng.randrange(new)
        alone = AttentionMetadata(torch.tensor([0, 1]).int(), torch.tensor([lengths[0] - new + row + 1]).int(), tables)
        got.append(cpu.latent_attention(q[row : row + 1], ours, alone, scale, spec.latent))
    finally:
        cpu.set_threads(before)
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2]) and torch.equal(got[0][row], got[3][0])
    error = (got[0] - reference.latent_attention(q, theirs, metadata, scale, spec.latent)).float()
    assert error.square().mean() < 4e-4 * got[0].float().square().mean()


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_linear_by_head_and_latent_rope_match_reference(seed: int) -> None:
    """Inputs and outputs are columns of larger tensors. Splitting the batch does not change the bits."""
    rng = Random(seed)
    dtype, tokens, heads = rng.choice(DTYPES), rng.randint(2, 300), rng.randint(1, 5)
    inputs, outputs = rng.randint(1, 150), rng.randint(1, 150)
    weight = randn(seed, heads, outputs, inputs, dtype=dtype)
    x = randn(seed + 1, tokens, heads, inputs + 7, dtype=dtype)[..., 3 : 3 + inputs]
    packed, out = cpu.pack_by_head(weight), torch.full((tokens, heads, outputs + 5), 7, dtype=dtype)
    got = cpu.linear_by_head(x, packed, out[..., 2 : 2 + outputs])
    assert_close(got, reference.linear_by_head(x, reference.pack_by_head(weight)), 5)
    assert (out[..., :2] == 7).all()
    assert (out[..., 2 + outputs :] == 7).all()
    cut = rng.randint(1, tokens - 1)
    parts = torch.cat([cpu.linear_by_head(x[:cut], packed), cpu.linear_by_head(x[cut:], packed)])
    assert torch.equal(got, parts)

    rope, latent, pairs = 2 * rng.choice((8, 16)), 16 * rng.randint(1, 3), rng.random() < 0.5
    spec = KVSpec(1, latent + rope, NAMES[dtype], 16, rng.choice(KV_QUANTIZATIONS), latent=latent)
    q, down = (
        randn(seed + 2, tokens, heads, rope + 8, dtype=dtype)[..., 8:],
        randn(seed, tokens, 64 + rope, dtype=dtype),
    )
    table, positions = randn(seed, 50, rope), torch.tensor([rng.randrange(50) for _ in range(tokens)])
    slots = torch.tensor(rng.sample(range(320), tokens))
    buffers = []
    for ops in (cpu, reference):
        cache, rotated = ops.new_kv_cache([spec], 20, CPU)[0], torch.empty((tokens, heads, rope + 4), dtype=dtype)
        ops.latent_rope_and_store(
            q, down[:, 64:], down[:, :latent], positions, table, cache, slots, pairs, rotated[..., 4:]
        )
        (layout,) = transfer_layouts([spec], 32)
        buffer = torch.zeros(10 * layout.slot_bytes, dtype=torch.uint8)
        ops.export_kv(cache, slots, buffer, slots, layout)
        again = ops.new_kv_cache([spec], 20, CPU)[0]
        ops.import_kv(again, slots, buffer, slots, layout)
        copy = torch.zeros_like(buffer)
        ops.export_kv(again, slots, copy, slots, layout)
        assert torch.equal(buffer, copy)
        buffers.append((rotated[..., 4:].contiguous(), buffer))
    assert_close(buffers[0][0], buffers[1][0], 3)
    if dtype is torch.bfloat16 and not spec.quantization:
        assert_close(*(buffer.view(dtype) for _, buffer in buffers))


def test_unsupported_vector_size_is_refused() -> None:
    for spec in (KVSpec(1, 24, "float32", 16, latent=16), KVSpec(1, 1024, "float32", 16, latent=960)):
        with pytest.raises(PenstockError, match="CPU kernels support multiples of 16 up to 512 and 640"):
            cpu.new_kv_cache([spec], 1, CPU)


# --- Engines ---------------------------------------------------------------------------------------------------------

KINDS = ["float32 none auto", "bfloat16 w8a8 int8"]
MORE_KINDS = ["bfloat16 none auto", "bfloat16 none int8"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE_KINDS)])
def test_outputs_do_not_depend_on_the_batch(checkpoint: Path, kind: str) -> None:
    check_random_engines(checkpoint, kind, "latent")


@pytest.mark.slow
def test_ranks_stages_and_prefill_engine_answer_as_one_rank(checkpoint: Path, secret: str) -> None:
    kind, ranks = (
        "bfloat16 none int8",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "block_size": 32},
    )
    check_ranks_and_stages(checkpoint, kind, "latent")
    check_prefill_instance(checkpoint, kind, secret, "latent", ranks, {})


def test_step_exports_latent_vectors(checkpoint: Path) -> None:
    for name in ("cpu", "reference"):
        for quantization in ("", "int8"):
            test_kv_export.test_imported_kv_gives_same_hidden_states(checkpoint, backend(CPU, name), quantization)


def test_planned_kv_and_weight_bytes_equal_the_model(checkpoint: Path) -> None:
    """Compares KV bytes per token, and weight bytes. The absorbed matrix is not quantized."""
    config = read_config(checkpoint)
    model = load_model(checkpoint, backend(CPU, "reference"), LoadOptions(dtype=torch.bfloat16))
    size = model_size_of(config.raw)
    for quantization in ("auto", "int8"):
        planned = kv_specs(size, 16, quantization, "bfloat16")
        assert planned == model.kv_specs(16, "" if quantization == "auto" else quantization)
    assert sum(spec.bytes_per_token for spec in planned) == (48 + 4) * 3
    absorbed = 3 * 4 * 32 * (24 + 20)
    weights = 2 * absorbed + (size.layer_weights - absorbed) * (1 + 4 / 64)
    assert bytes_per_weight(size, "wint8", "bfloat16")[0] * size.layer_weights == pytest.approx(weights)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["fp8 blocks", "gptq asymmetric, act-order, v2"])
def test_quantized_checkpoint_matches_transformers(kind: str, tmp_path: Path) -> None:
    """The absorbed matrix is dequantized from any format."""
    sizes = LATENT | {"num_hidden_layers": 2, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 32}
    model = quantize(tmp_path, KINDS_OF_CHECKPOINTS[kind], DeepseekV3Config(**sizes | {"vocab_size": 320}))
    llm = LLM(tmp_path, ops="cpu", dtype="float32", block_size=16, num_gpu_blocks_override=50)
    test_models.test_logprobs_and_greedy_tokens_match_transformers((llm, model))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("knowing", [True, False])
def test_multi_token_prediction_layers_generate_drafts(knowing: bool, tmp_path: Path) -> None:
    """In DeepSeek-V3, multi-token prediction layers also have latent attention and experts."""
    config = DeepseekV3Config(**LATENT | EXPERTS | {"vocab_size": 3584})
    check_heads(with_head(tmp_path, knowing, config), knowing)
