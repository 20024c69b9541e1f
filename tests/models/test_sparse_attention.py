"""Sparse attention: DeepSeek-V3.2 and GLM-5 compared with transformers, and kernels with the reference ops.

transformers' top-k breaks ties in any order, and scores of zero are frequent with few index heads. The tests therefore
replace ``Tensor.topk`` in its indexers by a stable sort: of equal scores, the first positions are selected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import test_kv_export
import test_latent_attention
import test_models
import test_prefill_decode
import torch
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model
from quantized import KINDS, quantize
from safetensors.torch import load_file
from same_bits import check_prefill_instance, check_random_engines, check_ranks_and_stages
from test_exactness import ADAPTERS
from test_latent_attention import EXPERTS, LATENT, SCALED, save_with_bias, store
from test_ops import DTYPES, NAMES, assert_close, cpu, draw_batch, kernels, randn, seeds
from test_speculation import check_heads, with_head
from torch import Tensor
from transformers import DeepseekV32Config, GlmMoeDsaConfig, PreTrainedConfig

from penstock import LoRARequest
from penstock.config.options import EngineOptions
from penstock.core import PenstockError
from penstock.engine.engine_folder import build_engine
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.models.convert import convert
from penstock.models.loader import LoadOptions, load_model
from penstock.ops import AttentionMetadata, KVSpec, backend, reference
from penstock.planning.kv_size import kv_specs
from penstock.planning.model_size import model_size_of, size_of
from penstock.planning.pipeline import split_layers

SPARSE = LATENT | {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 32, "n_group": 1, "topk_group": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "v3.2": DeepseekV32Config(**SPARSE),
    "v3.2, one head, biases, yarn": DeepseekV32Config(
        **SPARSE | {"index_n_heads": 1, "index_topk": 8}, **SCALED, attention_bias=True
    ),
    "v3.2, experts": DeepseekV32Config(**SPARSE | EXPERTS | {"index_head_dim": 16}),
    "glm-5": GlmMoeDsaConfig(**SPARSE),
    "glm-5, shared selection, experts": GlmMoeDsaConfig(
        **SPARSE | EXPERTS | {"num_hidden_layers": 5, "index_topk": 32},
        indexer_types=["full", "shared"] * 2 + ["shared"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"],
    ),
    "glm-5, last layer selects": GlmMoeDsaConfig(**SPARSE, index_topk_pattern="FSF"),
}

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100}

# Tests and fixtures of other modules that also run for models with sparse attention:
ops = test_models.ops
export_ops = test_kv_export.ops
secret = test_prefill_decode.secret
instruction_set = test_latent_attention.instruction_set
test_logprobs_and_greedy_tokens_match_transformers = test_models.test_logprobs_and_greedy_tokens_match_transformers
test_bfloat16_error_is_near_that_of_transformers = test_models.test_bfloat16_error_is_near_that_of_transformers


@pytest.fixture(scope="module", autouse=True)
def stable_topk() -> Iterator[None]:
    """Select the first of equal scores in transformers' models."""

    def topk(scores: Tensor, k: int, dim: int = -1) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk)
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, ops: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_with_bias(CONFIGS[request.param], folder)
    return LLM(folder, ops=ops, **OPTIONS, max_num_batched_tokens=50), model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with adapters, also of the indexer, for the tests of ``test_exactness``."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_with_bias(CONFIGS["glm-5, shared selection, experts"], folder)
    for rank, name in enumerate(ADAPTERS, 3):
        targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "wq_b", "wk"]
        adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
        for weight in adapted.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        adapted.save_pretrained(folder / name)
        model = adapted.unload()
    return folder


# --- Kernels ---------------------------------------------------------------------------------------------------------


def fill(ops: Any, cache: Any, spec: KVSpec, rope: int, vectors: Tensor, slots: Tensor) -> None:
    """Store latent vectors with index keys at position 0, where rotation changes nothing."""
    table = torch.cat((torch.ones(rope // 2), torch.zeros(rope // 2)))[None]
    none, positions = vectors.new_zeros(len(vectors), 1, rope), torch.zeros(len(vectors), dtype=torch.int64)
    latent, k, index_keys = vectors.split([spec.latent, rope, spec.index_dim], 1)
    ops.latent_rope_and_store(
        none, k, latent, positions, table, cache, slots, False, torch.empty_like(none), index_keys
    )


def slots_of(table: Tensor, length: int, block_size: int) -> Tensor:
    at = torch.arange(length)
    return table.long()[at // block_size] * block_size + at % block_size


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_selection_and_sparse_attention_match_reference(seed: int) -> None:
    """A query alone, in blocks of another size, selects the same positions and has the same bits as in the batch. If
    all positions are selected, the bits are those of dense attention."""
    rng = Random(seed)
    dtype, block_size, heads, rope = rng.choice(DTYPES), 16 * rng.randint(1, 5), rng.randint(1, 40), 16
    index_heads, top_k = rng.choice((1, 2, 5, 32)), rng.choice((1, 8, 33, 100, 200))
    latent, index_dim = rng.choice((16, 48, 512)), rng.choice((16, 48, 128))
    spec = KVSpec(1, latent + rope + index_dim, NAMES[dtype], block_size, latent=latent, index_dim=index_dim)
    batch, tokens, blocks = draw_batch(rng, block_size, rng.randint(1, 3))
    ours, theirs = (ops.new_kv_cache([spec], blocks, CPU)[0] for ops in (cpu, reference))
    other = cpu.new_kv_cache([replace(spec, block_size=64)], 3, CPU)[0]
    plain = replace(spec, head_dim=latent + rope, index_dim=0)
    dense = cpu.new_kv_cache([plain], blocks, CPU)[0]
    for cache in (ours, other, dense):
        cache.data.fill_(255)  # bytes of 255 are NaN
    # few different integers, so that scores are exact and often equal
    index_q = torch.randint(-2, 3, (tokens, index_heads, index_dim)).to(dtype)
    weights, q = (
        torch.randint(-3, 4, (tokens, index_heads)).float(),
        randn(seed, tokens, heads, latent + rope, dtype=dtype),
    )
    starts, scale, lone = batch.attention.query_start_loc.tolist(), (latent + rope) ** -0.5, []
    for i, length in enumerate(batch.attention.seq_lens.tolist()):
        vectors = randn(rng.getrandbits(31), length, spec.head_dim, dtype=dtype)
        vectors[:, -index_dim:] = torch.randint(-1, 2, (length, index_dim))
        slots = slots_of(batch.attention.block_tables[i], length, block_size)
        for ops, cache in ((cpu, ours), (reference, theirs)):
            fill(ops, cache, spec, rope, vectors, slots)
        fill(cpu, other, spec, rope, vectors, torch.arange(length))
        store(cpu, dense, vectors[:, : latent + rope], rope, slots)
        row = rng.randrange(starts[i], starts[i + 1])
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=batch.positions[row : row + 1].int() + 1,
            block_tables=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        )
        here = slice(row, row + 1)
        alone = cpu.select_keys(index_q[here], weights[here], other, metadata, top_k, 0.5)
        lone.append((row, alone, cpu.latent_attention(q[here], other, alone, scale, latent, selected=True)[0]))
    got = cpu.select_keys(index_q, weights, ours, batch.attention, top_k, 0.5)
    expected = reference.select_keys(index_q, weights, theirs, batch.attention, top_k, 0.5)
    assert torch.equal(got.seq_lens, expected.seq_lens) and torch.equal(got.query_start_loc, expected.query_start_loc)
    used = torch.arange(top_k) < got.seq_lens[:, None]
    assert torch.equal(got.block_tables[used], expected.block_tables[used])
    attended = cpu.latent_attention(q, ours, got, scale, latent, selected=True)
    assert_close(attended, reference.latent_attention(q, theirs, expected, scale, latent, selected=True).contiguous())
    for row, alone, result in lone:
        assert alone.seq_lens[0] == got.seq_lens[row] and torch.equal(result, attended[row])
    everything = cpu.select_keys(index_q, weights, ours, batch.attention, 200, 0.5)
    whole = cpu.latent_attention(q, dense, batch.attention, scale, latent)
    assert torch.equal(cpu.latent_attention(q, ours, everything, scale, latent, selected=True), whole)


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_selection_does_not_depend_on_the_number_of_threads(seed: int) -> None:
    """Compares long sequences, whose positions are divided among threads, with real numbers as scores. The selected
    scores are the largest."""
    rng = Random(seed)
    dtype, lengths, new, top_k = rng.choice(DTYPES), [1700, 700], 3, 600
    spec = KVSpec(1, 96, NAMES[dtype], 64, latent=32, index_dim=32)
    (cache,), tables = cpu.new_kv_cache([spec], 54, CPU), torch.randperm(54).int().view(2, 27)
    keys = [randn(rng.getrandbits(31), length, 96, dtype=dtype) for length in lengths]
    for table, vectors in zip(tables, keys, strict=True):
        fill(cpu, cache, spec, 32, vectors, slots_of(table, len(vectors), 64))
    q, index_q = randn(seed, 6, 20, 64, dtype=dtype), randn(seed, 6, 8, 32, dtype=dtype)
    weights, metadata = (
        randn(seed, 6, 8),
        AttentionMetadata(torch.tensor([0, new, 2 * new]).int(), torch.tensor(lengths).int(), tables),
    )
    before, found = kernels.threads(), []
    try:
        for threads in (1, 2, 5):
            cpu.set_threads(threads)
            selected = cpu.select_keys(index_q, weights, cache, metadata, top_k, 0.2)
            found.append((selected.block_tables, cpu.latent_attention(q, cache, selected, 0.1, 32, selected=True)))
    finally:
        cpu.set_threads(before)
    for slots, attended in found[1:]:
        assert torch.equal(slots, found[0][0]) and torch.equal(attended, found[0][1])
    for row, slots in enumerate(found[0][0]):
        sequence = row // new
        end = lengths[sequence] - new + 1 + row % new
        scores = (index_q[row].float() @ keys[sequence][:end, -32:].float().T).relu().mul(weights[row, :, None]).sum(0)
        chosen = torch.isin(slots_of(tables[sequence], end, 64), slots)
        assert chosen.sum() == top_k and scores[chosen].min() >= scores[~chosen].max() - 1e-4


# --- Engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32 none auto", "bfloat16 w8a8 auto"])
def test_outputs_do_not_depend_on_the_batch(checkpoint: Path, kind: str) -> None:
    check_random_engines(checkpoint, kind, "sparse")


@pytest.mark.slow
def test_ranks_stages_and_prefill_engine_answer_as_one_rank(checkpoint: Path, secret: str) -> None:
    kind, ranks = (
        "bfloat16 none auto",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "block_size": 32},
    )
    check_ranks_and_stages(checkpoint, kind, "sparse")
    check_prefill_instance(checkpoint, kind, secret, "sparse", ranks, {})


@pytest.mark.parametrize("name", ["v3.2", "glm-5, shared selection, experts"])
def test_adapter_of_indexer_matches_peft(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapted = get_peft_model(save_with_bias(CONFIGS[name], tmp_path), LoraConfig(r=4, target_modules=["wq_b", "wk"]))
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    llm, prompt = LLM(tmp_path, **OPTIONS, enable_lora=True, max_loras=1), test_models.draw(5, 150)
    params = test_models.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for lora in (None, LoRARequest("adapter", 1, str(tmp_path / "adapter"))):
        (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=lora)
        found.append([next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[1:] if each])
    with torch.inference_mode():
        table = adapted(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = table[torch.arange(149), prompt[1:]].tolist()
    assert found[1] == pytest.approx(expected, abs=1e-4) and found[0] != pytest.approx(expected, abs=1e-2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["v3.2", "glm-5, last layer selects"])
def test_fp8_checkpoint_matches_transformers(name: str, tmp_path: Path) -> None:
    """As published: all matrices of the layers in blocks, but for ``weights_proj``."""
    sizes = {"q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 32, "vocab_size": 320}
    whole = [f"model.layers.{layer}.self_attn.indexer.weights_proj" for layer in range(3)]
    kind = replace(KINDS["fp8 blocks, ue8m0"], skip=("lm_head", *whole))
    model = quantize(tmp_path, kind, type(CONFIGS[name])(**CONFIGS[name].to_dict() | sizes))
    llm = LLM(tmp_path, ops="cpu", **OPTIONS)
    test_models.test_logprobs_and_greedy_tokens_match_transformers((llm, model))


def test_step_exports_latent_vectors_and_index_keys(checkpoint: Path) -> None:
    for name in ("cpu", "reference"):
        test_kv_export.test_imported_kv_gives_same_hidden_states(checkpoint, backend(CPU, name), "")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("accurate", [True, False])
@pytest.mark.parametrize("name", ["v3.2, experts", "glm-5, last layer selects"])
def test_multi_token_prediction_layers_generate_drafts(name: str, accurate: bool, tmp_path: Path) -> None:
    """The layers have indexers. transformers ignores these layers, so that the test writes them."""
    config = CONFIGS[name]
    config = type(config)(**config.to_dict() | {"vocab_size": 3584})
    check_heads(with_head(tmp_path, accurate, config), accurate)


@pytest.mark.slow
def test_token_trees_do_not_change_outputs(tmp_path: Path) -> None:
    config = CONFIGS["v3.2, experts"]
    folder = with_head(tmp_path, False, type(config)(**config.to_dict() | {"vocab_size": 3584}))
    prompts = [test_models.draw(length, length) for length in (3, 30, 70)]
    params = test_models.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    speculative = {"method": "mtp", "adaptive": False, "speculative_token_tree": "[(0,), (0, 0), (1,), (1, 0)]"}
    plain, tree = (
        LLM(folder, **OPTIONS, **more).generate(prompts, params, use_tqdm=False)
        for more in ({}, {"speculative_config": speculative})
    )
    assert [output.outputs for output in plain] == [output.outputs for output in tree]


def test_planned_kv_and_weight_bytes_equal_the_model(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    model = load_model(checkpoint, backend(CPU, "reference"), LoadOptions(dtype=torch.bfloat16))
    size = model_size_of(config.raw)
    assert kv_specs(size, 16, "auto", "bfloat16") == model.kv_specs(16)
    assert [spec.bytes_per_token for spec in model.kv_specs(16)] == [
        2 * (32 + 16 + 32 * selects) for selects in (1, 0, 1, 0, 0)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_planned_weights_equal_transformers_parameters(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = test_models.AutoModelForCausalLM.from_config(config)
    expected = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    size = model_size_of({**config.to_dict(), "architectures": [f"{type(config).__name__[:-6]}ForCausalLM"]})
    assert size.layer_weights + size.embedding_weights == expected


def test_engine_folder_gives_same_answers_and_is_converted_to_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    build_engine(EngineOptions(model=str(checkpoint), dtype="float32"), tmp_path / "engine")
    convert(tmp_path / "engine", tmp_path / "new")
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "new"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    prompts, params = [test_models.draw(3, 90)], test_models.SamplingParams(max_tokens=8, logprobs=1, seed=0)
    packed, plain = (
        LLM(folder, **OPTIONS).generate(prompts, params, use_tqdm=False) for folder in (tmp_path / "engine", checkpoint)
    )
    assert [output.outputs for output in packed] == [output.outputs for output in plain]


def test_stages_begin_with_layers_that_select_keys(checkpoint: Path) -> None:
    size = size_of(read_config(checkpoint))
    assert split_layers(size, 2) == [range(2), range(2, 5)]
    assert split_layers(size, 2, "2,3") == [range(2), range(2, 5)]
    with pytest.raises(PenstockError, match="begins a stage with layer 3, which attends to the keys selected by"):
        split_layers(size, 2, "3,2")
    with pytest.raises(PenstockError, match="only 2 groups of layers select their own keys"):
        split_layers(size, 3)
    frequent = replace(size, num_layers=12, shared_layers=frozenset((1, 2, 4, 5, 7, 8, 10, 11)))
    assert split_layers(frequent, 4) == [range(3), range(3, 6), range(6, 9), range(9, 12)]


def test_unsupported_options_are_refused(checkpoint: Path) -> None:
    for dtype in ("int8", "fp8"):
        with pytest.raises(PenstockError, match=f"kv_cache_dtype: {dtype} is not supported for GlmMoeDsaForCausalLM"):
            LLM(checkpoint, kv_cache_dtype=dtype)
        with pytest.raises(PenstockError, match=f"kv_cache_dtype: {dtype} is not supported for GlmMoeDsaForCausalLM"):
            kv_specs(size_of(read_config(checkpoint)), kv_cache_dtype=dtype)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk": 0}, "index_topk is 0; it must be from 1 to 8192"),
        ({"index_n_heads": 129}, "index_n_heads is 129; it must be from 1 to 128"),
        ({"index_head_dim": 24}, "index_head_dim is 24; it must be a multiple of 16 from qk_rope_head_dim"),
        ({"q_lora_rank": 0}, "q_lora_rank is missing"),
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types is .* and full for the first"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types is .* for each of 3 layers"),
    ],
)
def test_unsupported_sizes_are_refused_before_weights_are_read(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = GlmMoeDsaConfig(**SPARSE | EXPERTS).to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"]} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PenstockError, match=message):
        read_config(tmp_path)
