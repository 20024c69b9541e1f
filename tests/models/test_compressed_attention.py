"""Compressed attention and hyper-connections: DeepSeek-V4 compared with transformers, and kernels with reference ops.

transformers' top-k breaks ties in any order, and scores of zero are frequent with few index heads. The tests therefore
replace ``Tensor.topk`` in its indexer by a stable sort: of equal scores, the first entries are selected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import test_latent_attention
import test_models
import test_prefill_decode
import torch
from checkpoints import SMALL, save
from compressed_checks import (
    Backend,
    check_entries_and_attention,
    check_hyper_connections,
    check_rotation_of_tails,
    check_selection_of_entries,
)
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from same_bits import check_prefill_instance, check_random_engines, check_ranks_and_stages
from test_exactness import NGRAM, STATES
from test_families import GREEDY, OPTIONS, check
from test_ops import DTYPES, NAMES, assert_close, cpu, kernels, randn, seeds
from test_state_families import NGRAMS, REPEATED, SEVERAL, outputs
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV4Config, FineGrainedFP8Config, PreTrainedModel, Qwen3Config

from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.experts_config import Routing
from penstock.cli.main import main
from penstock.config.options import EngineOptions
from penstock.core import PenstockError, SamplingParams
from penstock.engine.engine import Engine
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.models.loader import LoadOptions, load_model
from penstock.ops import AttentionMetadata, KVSpec, backend, reference
from penstock.ops.cpu.graph import MAX_CAPTURED_TOKENS
from penstock.planning.kv_size import kv_specs, weight_bytes
from penstock.planning.model_size import model_size_of, state_specs_of
from penstock.quant.fp8 import pack

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "layer_types": [SLIDING, CSA, HCA, CSA],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "compress_rates": {CSA: 4, HCA: 8},
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "all kinds of layers": {},
    "rates of published models, last layer HCA, two streams": {
        "compress_rates": {CSA: 4, HCA: 128},
        "layer_types": [HCA, HCA, CSA, HCA],
        "hc_mult": 2,
        "index_topk": 16,
        "sliding_window": 32,
    },
    "odd rates, one stream, sigmoid": {
        "compress_rates": {CSA: 3, HCA: 5},
        "hc_mult": 1,
        "scoring_func": "sigmoid",
        "mlp_layer_types": ["moe"] * 4,
        "index_n_heads": 1,
        "index_topk": 7,
        "sliding_window": 5,
        "o_groups": 4,
    },
    "rates 1 and 2, last layer without entries": {
        "compress_rates": {CSA: 1, HCA: 2},
        "layer_types": [CSA, HCA, SLIDING, SLIDING],
        "hc_sinkhorn_iters": 3,
        "index_topk": 33,
    },
    "yarn, many experts per token": {
        "rope_parameters": YARN | {"rope_theta": 10_000.0},
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.25,
        "mlp_layer_types": ["hash_moe"] * 4,
    },
    "no entries": {"layer_types": [SLIDING] * 4, "num_hidden_layers": 4},
}

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the positive codes of mxfp4."""
CPU = torch.device("cpu")
CPU_OPS = Backend(
    cpu,
    DTYPES,
    dims=(16, 48, 512),
    rates=(1, 2, 4, 5, 128),
    vectors=lambda cache: cache.data.view(getattr(torch, cache.spec.dtype)).view(-1, cache.spec.head_dim),
    assert_close=assert_close,
)
secret = test_prefill_decode.secret
instruction_set = test_latent_attention.instruction_set


@pytest.fixture(scope="module", autouse=True)
def stable_topk() -> Iterator[None]:
    """Select the first of equal scores in transformers' models."""

    def topk(scores: Tensor, k: int, dim: int = -1) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk)
        yield


def save_v4(folder: Path, **sizes: Any) -> PreTrainedModel:
    """Write a checkpoint of random weights; return the model."""
    config = DeepseekV4Config(**SIZES | sizes)
    model = save(config, folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("sinks", "position_bias", "base")):
                torch.nn.init.normal_(weight, std=0.5)
            elif name.endswith("scale"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort(1)[:, : buffer.shape[1]])
    model.save_pretrained(folder)
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model, and in a folder a checkpoint of all kinds of layers, for the engines of ``test_exactness``."""
    folder = tmp_path_factory.mktemp("checkpoint")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save(Qwen3Config(**SMALL | heads, head_dim=16, sliding_window=None), folder)
    save_v4(folder / STATES, vocab_size=SMALL["vocab_size"])
    return folder


# --- Models ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_model_matches_transformers(name: str, tmp_path: Path) -> None:
    check(tmp_path, save_v4(tmp_path, **CONFIGS[name]), 10.0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", list(CONFIGS)[:2])
def test_bfloat16_error_is_near_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_v4(tmp_path, **CONFIGS[name])
    """Compares medians, since single errors depend on which entries and experts are selected."""
    rough = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    rough.set_experts_implementation("eager")
    llm = LLM(tmp_path, **OPTIONS | {"dtype": "bfloat16"})
    params, errors = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), torch.zeros(2)
    prompts = [test_models.draw(seed, 200) for seed in range(4)]
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        with torch.inference_mode():
            expected, theirs = (
                each(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[range(199), prompt[1:]]
                for each in (model, rough)
            )
        ours = [found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()]
        errors += torch.tensor([float((got - expected).abs().median()) for got in (torch.tensor(ours), theirs)])
    assert errors[0] <= 1.2 * errors[1]


def test_reference_ops_match_cpu_kernels(tmp_path: Path) -> None:
    save_v4(tmp_path)
    ours, theirs = (
        LLM(tmp_path, **OPTIONS, ops=ops, speculative_config=NGRAMS).generate(REPEATED, GREEDY, use_tqdm=False)
        for ops in ("cpu", "reference")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        for found, expected in zip(mine.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True):
            for token, logprob in expected.items():
                assert found[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def test_published_names_and_fields_give_the_same_model(tmp_path: Path) -> None:
    """Published checkpoints have no prefix ``model.``, and other names in ``config.json``."""
    sizes = {"compress_rates": {CSA: 4, HCA: 128}, "rope_parameters": YARN | {"rope_theta": 10_000.0}}
    save_v4(tmp_path, **sizes)
    expected = outputs(tmp_path, GREEDY, REPEATED)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    names = {"model.embed_tokens.weight": "embed.weight"}
    names |= {f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
    tensors = {names.get(name, name.removeprefix("model.")): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"mtp.0.e_proj.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    raw = json.loads(path.read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters"):
        del raw[name]
    scaling = {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}}
    raw |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 2, "qk_rope_head_dim": 16, "rope_scaling": scaling}
    path.write_text(json.dumps(raw))
    assert outputs(tmp_path, GREEDY, REPEATED) == expected


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_quantized_checkpoint_matches_transformers(experts: str, tmp_path: Path) -> None:
    """As published: experts in mxfp4 or fp8, and the other matrices in blocks of fp8, except those of compressors, the
    weights of index heads and routers."""
    model = save_v4(tmp_path, q_lora_rank=48)
    file, tensors = tmp_path / "model.safetensors", dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        whole = ("compressor", "weights_proj", "ffn.gate", "norm", "embed", "head", "hc_")
        published = name.removeprefix("model.").replace("embed_tokens", "embed")
        for part in ("fn", "base", "scale"):
            published = published.replace(f"hc_head.hc_{part}", f"hc_head_{part}")
        scales = published.removesuffix("weight") + "scale"
        if tensor.dim() != 2 or any(part in name for part in whole):
            tensors[published] = tensor
        elif ".experts." in name and experts == "fp4":
            groups = tensor.unflatten(1, (-1, 32))
            factors = torch.exp2((groups.abs().amax(-1, keepdim=True) / 6).log2().ceil())
            table = torch.tensor([*E2M1, *(-each for each in E2M1)])
            codes = (groups / factors)[..., None].sub(table).abs().argmin(-1).flatten(1).to(torch.uint8)
            tensors[published] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
            tensors[scales] = factors[..., 0].to(torch.float8_e8m0fnu)
        else:
            _, factors = pack(tensor, 16, 32)
            factors = torch.exp2(factors.log2().ceil())
            spread = factors.repeat_interleave(16, 0)[: len(tensor)].repeat_interleave(32, 1)[:, : tensor.shape[1]]
            tensors[published] = (tensor / spread).to(torch.float8_e4m3fn)
            tensors[scales] = factors.to(torch.float8_e8m0fnu)
    save_file(tensors, file, {"format": "pt"})
    path = tmp_path / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    raw = json.loads(path.read_text()) | {"expert_dtype": experts, "quantization_config": quantization}
    path.write_text(json.dumps(raw))
    dequantize = FineGrainedFP8Config(weight_block_size=(16, 32), dequantize=True, scale_fmt="ue8m0")
    del model
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=dequantize)
    read.set_experts_implementation("eager")
    check(tmp_path, read, 10.0)


def test_engine_folder_and_its_conversion_have_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    save_v4(tmp_path / "checkpoint")
    assert (
        main(["build", str(tmp_path / "checkpoint"), "--output-dir", str(tmp_path / "engine"), "--dtype", "float32"])
        == 0
    )
    assert main(["convert", str(tmp_path / "engine"), "--output-dir", str(tmp_path / "converted")]) == 0
    expected = outputs(tmp_path / "checkpoint", GREEDY, REPEATED)
    for folder in ("engine", "converted"):
        assert outputs(tmp_path / folder, GREEDY, REPEATED) == expected


@pytest.mark.slow
def test_steps_without_a_captured_graph_have_the_same_bits(tmp_path: Path) -> None:
    save_v4(tmp_path)
    prompts = [[Random(seed).randrange(2, 300) for _ in range(280)] for seed in range(MAX_CAPTURED_TOKENS // 280 + 1)]
    captured, other = (
        outputs(tmp_path, GREEDY, prompts, max_num_batched_tokens=tokens, num_gpu_blocks_override=400)
        for tokens in (200, 2 * MAX_CAPTURED_TOKENS)
    )
    assert captured == other


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONFIGS)[:3])
def test_bits_do_not_depend_on_drafts_and_ranks(name: str, tmp_path: Path) -> None:
    save_v4(tmp_path, **CONFIGS[name])
    for sampling in (GREEDY, SEVERAL):
        expected = outputs(tmp_path, sampling, REPEATED, max_num_batched_tokens=512, num_gpu_blocks_override=400)
        for options in (
            {"speculative_config": NGRAMS},
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2, "speculative_config": NGRAMS},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "speculative_config": NGRAMS},
        ):
            assert outputs(tmp_path, sampling, REPEATED, **options) == expected, options


@pytest.mark.slow
@pytest.mark.parametrize("kind", [f"float32 none auto {STATES}", f"bfloat16 w8a8 auto {STATES}"])
def test_outputs_do_not_depend_on_the_batch(kind: str, checkpoint: Path) -> None:
    check_random_engines(checkpoint, kind, "compressed", adapters=False)
    check_ranks_and_stages(checkpoint, kind, "compressed", adapters=False)


@pytest.mark.slow
def test_prefill_and_decode_engines_answer_as_one_engine(checkpoint: Path, secret: str) -> None:
    kind, stages = f"bfloat16 none auto {STATES}", {"pipeline_parallel_size": 2}
    decode = stages | {"speculative_config": NGRAM}
    check_prefill_instance(checkpoint, kind, secret, "compressed", stages, decode, adapters=False)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 4},
        {"kv_cache_dtype": "int8"},
        {"load_format": "dummy"},
        {"enable_lora": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_unsupported_options_are_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    save_v4(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # the options are checked before weights are read
    with pytest.raises(PenstockError, match=f"{next(iter(options))}.*not supported for DeepseekV4ForCausalLM"):
        Engine(EngineOptions(**{"model": str(tmp_path)} | OPTIONS | options))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"head_dim": 40, "partial_rotary_factor": 0.4}, "head_dim is 40"),
        ({"hc_mult": 9}, "hc_mult is 9"),
        ({"o_groups": 3}, "o_groups is 3"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ({"compress_rates": {CSA: 4, HCA: 2000}}, "compress_rates is 2000"),
        ({"layer_types": None, "compress_ratios": [0, 4, 64, 4]}, "compress_ratios has 64"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = DeepseekV4Config(**SIZES).to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]} | fields
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    with pytest.raises(PenstockError, match=message):
        read_config(tmp_path)


def test_hash_table_with_unknown_experts_is_refused(tmp_path: Path) -> None:
    save_v4(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.ffn.gate.tid2eid"][7, 1] = 8
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PenstockError, match="tid2eid has experts from 0 to 8"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize("name", CONFIGS)
def test_plan_has_the_sizes_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    model = save_v4(tmp_path, **CONFIGS[name])
    counted = [each for part, each in model.named_parameters() if each.dim() > 1 and not part.endswith("position_bias")]
    size = model_size_of(read_config_json(tmp_path))
    assert weight_bytes(size, dtype="float32") == 4 * sum(each.numel() for each in counted)
    config = read_config(tmp_path)
    built = load_model(tmp_path, backend(CPU, "cpu"), LoadOptions(dtype=torch.float32), config)
    assert kv_specs(size, 16, dtype="float32") == built.kv_specs(16)
    assert list(state_specs_of(config)) == built.state_specs()


# --- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_entries_and_attention_match_reference(seed: int) -> None:
    check_entries_and_attention(CPU_OPS, seed)


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_selection_of_entries_matches_reference(seed: int) -> None:
    check_selection_of_entries(CPU_OPS, seed)


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_long_lists_of_entries_match_reference_with_any_number_of_threads(seed: int) -> None:
    """Scores and attention of long sequences are divided among threads; sinks are added once."""
    rng = Random(seed)
    dtype, lengths, new, dim, index_dim, rate = rng.choice(DTYPES), [1700, 900], 3, 32, 16, rng.choice((1, 2))
    spec = KVSpec(1, 2 * dim + index_dim, NAMES[dtype], 64, latent=dim, index_dim=dim + index_dim)
    ours, theirs = (ops.new_kv_cache([spec], 54, CPU)[0] for ops in (cpu, reference))
    vectors = randn(seed, 54 * 64, spec.head_dim, dtype=dtype)
    ours.data.view(dtype).view(-1, spec.head_dim).copy_(vectors)
    theirs.view(-1, spec.head_dim).copy_(vectors)
    starts, tables = torch.tensor([0, new, 2 * new]).int(), torch.randperm(54).int().view(2, 27)
    metadata = AttentionMetadata(starts, torch.tensor(lengths).int(), tables)
    q, sinks = randn(seed + 1, 2 * new, 20, dim, dtype=dtype), randn(seed + 2, 20) * 3
    index_q, weights = randn(seed + 3, 2 * new, 4, index_dim, dtype=dtype), randn(seed + 4, 2 * new, 4)
    before, found = kernels.threads(), []
    try:
        for threads in (1, 2, 5):
            cpu.set_threads(threads)
            every = cpu.select_entries(ours, metadata, 2 * new, 128, rate, 1700 // rate)
            some = cpu.select_entries(ours, metadata, 2 * new, 128, rate, 300, index_q, weights, 0.3)
            found.append([cpu.compressed_attention(q, ours, each, 0.2, sinks) for each in (every, some)])
    finally:
        cpu.set_threads(before)
    for attended in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(attended, found[0], strict=True))
    for selection, attended in zip((every, some), found[0], strict=True):
        assert_close(attended, reference.compressed_attention(q, theirs, selection, 0.2, sinks))
    whole = reference.select_entries(theirs, metadata, 2 * new, 128, rate, 1700 // rate)
    used = torch.arange(whole.block_tables.shape[1]) < whole.seq_lens[:, None]
    assert torch.equal(whole.block_tables[used], every.block_tables[used])


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_hyper_connections_match_reference(seed: int) -> None:
    check_hyper_connections(CPU_OPS, seed)


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_rotation_of_tails_matches_reference(seed: int) -> None:
    check_rotation_of_tails(CPU_OPS, seed)


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_experts_by_token_id_match_reference(seed: int) -> None:
    rng = Random(seed)
    tokens, experts, top_k = rng.randint(1, 5), rng.choice((8, 33)), rng.randint(1, 8)
    logits, token_ids = randn(seed, tokens, experts) * 5, torch.randint(0, 50, (tokens,))
    table = torch.rand(50, experts).argsort(1)[:, :top_k].contiguous()
    for scores in ("softmax", "sigmoid", "sqrtsoftplus"):
        routing = Routing(top_k, scores, renormalize=True, scale=1.5, added_sum=1e-20)
        for given_table in (None, table):
            ids, weights = cpu.select_experts(logits, routing, None, None, token_ids, given_table)
            expected, others = reference.select_experts(logits, routing, None, None, token_ids, given_table)
            assert torch.equal(ids, expected)
            assert_close(weights, others)


def test_entries_do_not_depend_on_threads(tmp_path: Path) -> None:
    save_v4(tmp_path)
    before, found = kernels.threads(), []
    try:
        for threads in (1, 3):
            found.append(outputs(tmp_path, GREEDY, REPEATED, threads=threads))
    finally:
        cpu.set_threads(before)
    assert found[0] == found[1]
