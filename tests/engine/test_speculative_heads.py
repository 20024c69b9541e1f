"""EAGLE, Medusa and MTP heads, which draft from the model's hidden states, compared with definitions in PyTorch."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Gemma2Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from penstock import LLM, PenstockError
from penstock.cli.main import main
from penstock.core import EngineRequest, SamplingParams
from penstock.planning.model_size import model_size_of

VOCAB, SIZE, LAYERS = 300, 64, 6
MEDUSA_FILE = "medusa_lm_head.pt"
"""File name of Medusa heads in the format of Medusa's authors."""
CONFIG = LlamaConfig(**{**SMALL, "num_hidden_layers": LAYERS, "tie_word_embeddings": False})
OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "dtype": "float32",
    "weight_cache_dir": "none",
    "num_gpu_blocks_override": 100,
    "max_model_len": 256,
}
PROMPTS = [[2 + (7 * i + n) % 290 for i in range(n)] for n in (1, 5, 20, 40, 70, 70)]
PARAMS = [
    SamplingParams(temperature=t, seed=i, max_tokens=30, n=n, ignore_eos=True, **more)
    for i, (t, n, more) in enumerate(
        [(0, 1, {}), (0.7, 2, {}), (0, 1, {"logprobs": 2}), (1, 1, {"top_p": 0.9}), (0, 1, {}), (1, 1, {})]
    )
]
DraftFunction = Callable[[list[int], int], list[int]]
"""Function that returns a greedy draft. Arguments: token ids of the sequence, and number of tokens to draft."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save(CONFIG, folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Any]:
    return answers(LLM(target, speculation=False, **OPTIONS))


def answers(llm: LLM, vocabulary: int = VOCAB) -> list[Any]:
    prompts = [[token % vocabulary for token in prompt] for prompt in PROMPTS]
    return [output.outputs for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def speculative(folder: Path, method: str = "", **options: Any) -> dict[str, Any]:
    return {"model": str(folder), "adaptive": False, "num_speculative_tokens": 4} | ({"method": method} | options)


# --- Heads and their definition ---------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def layer(weights: dict[str, Tensor], name: str, x: Tensor, residual: Tensor) -> Tensor:
    """Compute a decoder layer with rotary embedding, without input norm, for a whole sequence ``[length, inputs]``."""
    length, heads, kv_heads, dim = len(x), 4, 2, 16
    q, k, v = (F.linear(x, weights[f"{name}.self_attn.{part}_proj.weight"]).view(length, -1, dim) for part in "qkv")
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    cos, sin = (torch.cat((each, each), -1)[:, None] for each in (angles.cos(), angles.sin()))
    q, k = (t * cos + torch.cat((-t[..., dim // 2 :], t[..., : dim // 2]), -1) * sin for t in (q, k))
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
    x = residual + F.linear(attended, weights[f"{name}.self_attn.o_proj.weight"])
    h = norm(x, weights[f"{name}.post_attention_layernorm.weight"])
    gate, up, down = (weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def random_layer(name: str, inputs: int) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (SIZE, inputs),
        "self_attn.k_proj": (SIZE // 2, inputs),
        "self_attn.v_proj": (SIZE // 2, inputs),
        "self_attn.o_proj": (SIZE, SIZE),
        "mlp.gate_proj": (96, SIZE),
        "mlp.up_proj": (96, SIZE),
        "mlp.down_proj": (SIZE, 96),
    }
    weights = {f"{name}.{part}.weight": torch.randn(shape) * 0.2 for part, shape in shapes.items()}
    return weights | {f"{name}.post_attention_layernorm.weight": torch.rand(SIZE) + 0.5}


def save_head(folder: Path, weights: dict[str, Tensor], architecture: str, **config: Any) -> None:
    fields = {name: value for name, value in CONFIG.to_dict().items() if name in SMALL}
    fields |= {"architectures": [architecture], "model_type": "llama", "rms_norm_eps": 1e-6, "num_hidden_layers": 1}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def chain(
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], states: Tensor, tokens: list[int], count: int
) -> list[int]:
    """Draft tokens one at a time.

    Args:
        step: takes states ``[length, hidden]`` and the token after each; returns the new states, and the logits of the
            last position.
        states: states of all tokens except the last.
    """
    drafted: list[int] = []
    for _ in range(count):
        new, logits = step(states, torch.tensor((tokens + drafted)[1:]))
        states = torch.cat((states, new[-1:]))
        drafted.append(int(logits.argmax()))
    return drafted


def eagle3(folder: Path, model: PreTrainedModel, variant: str) -> DraftFunction:
    """Save a random EAGLE-3 head; return its draft function. Variants: ``published``, ``separate vocabulary`` (with a
    separate embedding), ``speculators`` (the format of that library)."""
    torch.manual_seed(1)
    name, config, aux = "midlayer", dict[str, Any](), (2, 3, 4)
    weights = {"fc.weight": torch.randn(SIZE, 3 * SIZE) * 0.1, "norm.weight": torch.rand(SIZE) + 0.5}
    if variant == "speculators":
        name, aux = "layers.0", (1, 3, 5)
        config = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": aux}
    else:
        aux, config = (2, 3, 5), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    weights |= random_layer(name, 2 * SIZE)
    weights |= {f"{name}.{part}.weight": torch.rand(SIZE) + 0.5 for part in ("input_layernorm", "hidden_norm")}
    target_ids = torch.arange(VOCAB)
    embedding, head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
    if variant == "separate vocabulary":
        target_ids = torch.randperm(VOCAB)[:100].sort().values
        weights["d2t"] = target_ids - torch.arange(100)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, target_ids, True)
        weights["lm_head.weight"] = head = head[target_ids].clone()
        weights["embed_tokens.weight"] = embedding = torch.randn(VOCAB, SIZE) * 0.2
        config["draft_vocab_size"] = 100
    save_head(folder, weights, "LlamaForCausalLMEagle3", **config)

    def step(states: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(states, weights[f"{name}.hidden_norm.weight"])
        embedded = norm(embedding[following], weights[f"{name}.input_layernorm.weight"])
        residual = normed if variant == "speculators" else states
        new = layer(weights, name, torch.cat((embedded, normed), -1), residual)
        logits = torch.full((VOCAB,), float("-inf"))
        logits[target_ids] = F.linear(norm(new[-1], weights["norm.weight"]), head)
        return new, logits

    def drafted(tokens: list[int], count: int) -> list[int]:
        hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = F.linear(torch.cat([hidden[number][0] for number in aux], -1), weights["fc.weight"])
        return chain(step, states, tokens, count)

    return torch.inference_mode()(drafted)


def eagle(folder: Path, model: PreTrainedModel, variant: str) -> DraftFunction:
    """Save a random EAGLE-1 head, with or without bias; return its draft function."""
    torch.manual_seed(2)
    weights = {"fc.weight": torch.randn(SIZE, 2 * SIZE) * 0.1, **random_layer("layers.0", SIZE)}
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.data.clone()
    if variant == "bias":
        weights["fc.bias"] = torch.randn(SIZE)
    save_head(folder, weights, "EagleLlamaForCausalLM")

    def step(states: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((weights["embed_tokens.weight"][following], states), -1)
        x = F.linear(both, weights["fc.weight"], weights.get("fc.bias"))
        new = layer(weights, "layers.0", x, x)
        return new, model.lm_head(new[-1])

    def drafted(tokens: list[int], count: int) -> list[int]:
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        return chain(step, states, tokens, count)

    return torch.inference_mode()(drafted)


def medusa(folder: Path, model: PreTrainedModel, variant: str) -> DraftFunction:
    """Save three random Medusa heads in the published layout or in vLLM's; return their draft function."""
    torch.manual_seed(3)
    num_layers = 2 if variant == "vLLM" else 1
    blocks = [[(torch.randn(SIZE, SIZE) * 0.2, torch.randn(SIZE)) for _ in range(num_layers)] for _ in range(3)]
    heads = [torch.randn(VOCAB, SIZE) for _ in blocks]
    weights: dict[str, Tensor] = {}
    for i, (block, head) in enumerate(zip(blocks, heads, strict=True)):
        for j, (weight, bias) in enumerate(block):
            name = f"blocks.{i}.layers.{j}" if variant == "vLLM" else f"medusa_head.{i}.{j}.linear"
            weights |= {f"{name}.weight": weight, f"{name}.bias": bias}
        weights[f"lm_heads.{i}.weight" if variant == "vLLM" else f"medusa_head.{i}.1.weight"] = head
    save_head(folder, weights, "MedusaModel")

    def drafted(tokens: list[int], count: int) -> list[int]:
        state, result = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1], []
        for block, head in list(zip(blocks, heads, strict=True))[:count]:
            x = state
            for weight, bias in block:
                x = x + F.silu(F.linear(x, weight, bias))
            result.append(int(F.linear(x, head).argmax()))
        return result

    return torch.inference_mode()(drafted)


HEADS = [
    (eagle3, "eagle3", "published"),
    (eagle3, "eagle3", "separate vocabulary"),
    (eagle3, "eagle3", "speculators"),
    (eagle, "eagle", "no bias"),
    (eagle, "eagle", "bias"),
    (medusa, "medusa", "published"),
    (medusa, "medusa", "vLLM"),
]


def head_id(each: Any) -> str:
    return each if isinstance(each, str) else ""


@pytest.mark.parametrize(("make", "method", "variant"), HEADS, ids=head_id)
def test_drafts_equal_definition_in_pytorch(
    target: Path, model: PreTrainedModel, tmp_path: Path, make: Any, method: str, variant: str
) -> None:
    drafted = make(tmp_path / "head", model, variant)
    compare_drafts(target, tmp_path / "head", drafted)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(
            **{**SMALL, "num_hidden_layers": LAYERS}, head_dim=16, query_pre_attn_scalar=16, sliding_window=32
        ),
        GraniteConfig(**{**SMALL, "num_hidden_layers": LAYERS}, residual_multiplier=0.3, embedding_multiplier=2.0),
        CohereConfig(**{**SMALL, "num_hidden_layers": LAYERS}),
        Gemma4TextConfig(
            **{**SMALL, "num_hidden_layers": LAYERS},
            head_dim=16,
            global_head_dim=32,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
            sliding_window=32,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=SMALL["vocab_size"],
        ),
        DeepseekV2Config(
            **{**SMALL, "num_hidden_layers": LAYERS, "num_key_value_heads": 4},
            first_k_dense_replace=2,
            kv_lora_rank=32,
            q_lora_rank=None,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_drafts_for_other_model_families_equal_definition(config: PreTrainedConfig, tmp_path: Path) -> None:
    """The models have post-norms, scaled residuals, parallel residuals, scaled layers with shared keys and values, and
    experts with a latent KV cache."""
    save(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    compare_drafts(tmp_path, tmp_path / "head", eagle3(tmp_path / "head", model, "published"))


def compare_drafts(target: Path, head: Path, drafted: DraftFunction) -> None:
    """Compare the drafts for each prompt with ``drafted``. The engine detects the method from the head's folder."""
    given = speculative(head)
    engine = LLM(target, speculative_config=given, enable_prefix_caching=False, **OPTIONS).engine
    compared = 0
    for prompt in PROMPTS:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.add(EngineRequest(request_id="one", prompt=prompt, sampling=params))
        tokens = list(prompt)
        while engine.busy:
            before = list(tokens)
            tokens += [token for delta in engine.step() for token in delta.token_ids]
            assert engine.last_plan
            for draft in [item.draft for item in engine.last_plan.scheduled if item.draft]:
                assert draft == drafted(before, len(draft))
                compared += len(draft)
    assert compared > 50


@pytest.mark.parametrize(("make", "method", "variant"), HEADS, ids=head_id)
def test_plan_includes_memory_of_heads(
    make: Callable[[Path, PreTrainedModel, str], DraftFunction],
    method: str,
    variant: str,
    target: Path,
    model: PreTrainedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The plan counts all weight matrices that are loaded, and its KV size equals the engine's log."""
    make(tmp_path, model, variant)
    config = json.dumps(speculative(tmp_path))
    flags = ["--model", str(target), "--dtype", "float32", "--max-model-len", "256", "--kv-cache-sequences", "2"]
    found = []
    for more in ([], ["--speculative-config", config]):
        assert main(["plan", "memory", "--json", *flags, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    tensors = load_file(tmp_path / "model.safetensors")
    if method == "eagle":
        del tensors["embed_tokens.weight"]  # EAGLE-1 heads use the model's embedding
    matrices = [tensor for tensor in tensors.values() if tensor.dim() > 1]
    assert found[1]["weight_bytes"] - found[0]["weight_bytes"] == 4 * sum(map(Tensor.numel, matrices))
    with caplog.at_level(logging.INFO):
        LLM(target, speculative_config=config, **OPTIONS)
    logged = next(message for message in caplog.messages if message.startswith("memory: "))
    assert f"{found[1]['kv_bytes_per_token']} bytes per token" in logged
    assert (found[1]["kv_bytes_per_token"] > found[0]["kv_bytes_per_token"]) == (method != "medusa")


# --- Outputs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """Model whose next token depends on the last token only, and heads that predict some of its tokens."""
    folder = tmp_path_factory.mktemp("simple")
    tokens = 60
    save(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": tokens}), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith("norm.weight"):
            tensor.fill_(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    states = norm(embedding, torch.ones(SIZE))
    following = F.linear(states, head).argmax(-1)
    heads = {method: folder / method for method in ("eagle3", "eagle", "medusa")}
    zero_layers = {
        method: random_layer(name, inputs) | {f"{name}.{part}.weight": torch.zeros(SIZE, 96 if "down" in part else SIZE)
        for part in ("self_attn.o_proj", "mlp.down_proj")}
        for method, name, inputs in (("eagle3", "midlayer", 2 * SIZE), ("eagle", "layers.0", SIZE))
    }  # fmt: skip
    shift = torch.linalg.lstsq(embedding, embedding[following]).solution.T
    eagle3 = zero_layers["eagle3"] | {
        "fc.weight": torch.cat((torch.zeros(SIZE, 2 * SIZE), shift), 1),
        **{f"{name}.weight": torch.ones(SIZE) for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")},
    }
    aux = {"eagle_aux_hidden_state_layer_ids": (1, 3, 5)}
    save_head(heads["eagle3"], eagle3, "LlamaForCausalLMEagle3", vocab_size=tokens, **aux)
    fc = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1)
    save_head(heads["eagle"], zero_layers["eagle"] | {"fc.weight": fc}, "EagleLlamaForCausalLM", vocab_size=tokens)
    medusa, later = dict[str, Tensor](), following
    for i in range(3):
        later = following[later]
        logits = 20 * F.one_hot(later, tokens).float()
        medusa[f"medusa_head.{i}.0.linear.weight"] = torch.zeros(SIZE, SIZE)
        medusa[f"medusa_head.{i}.1.weight"] = torch.linalg.lstsq(states, logits).solution.T
    save_head(heads["medusa"], medusa, "MedusaModel", vocab_size=tokens)
    return folder, heads


@pytest.fixture(scope="module")
def without_drafts(simple: tuple[Path, dict[str, Path]]) -> list[Any]:
    return answers(LLM(simple[0], speculation=False, **OPTIONS), 60)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 24},
        {"num_gpu_blocks_override": 24, "preemption_mode": "swap", "swap_space": 0.01},
        {"kv_offloading_size": 0.1, "num_gpu_blocks_override": 24},
    ],
    ids=str,
)
def test_drafts_do_not_change_outputs(
    simple: tuple[Path, dict[str, Path]], without_drafts: list[Any], method: str, options: dict[str, Any]
) -> None:
    folder, heads = simple
    llm = LLM(folder, speculative_config=speculative(heads[method], method), **OPTIONS | options)
    for _ in range(2):  # the second pass reads the prefixes from the cache
        assert answers(llm, 60) == without_drafts
    stats = llm.engine.scheduler.speculation.stats  # type: ignore[union-attr]
    assert stats.accepted_tokens > 0.1 * stats.draft_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_two_ranks_accept_same_drafts_as_one(
    simple: tuple[Path, dict[str, Path]], without_drafts: list[Any], method: str
) -> None:
    folder, heads = simple
    stats = []
    for size in (1, 2):
        tree = {"medusa_choices": [[0, 0], [0, 1], [1, 0]]} if method == "medusa" else {}
        given = speculative(heads[method], method, **tree)
        llm = LLM(folder, speculative_config=given, tensor_parallel_size=size, **OPTIONS)
        with closing(llm.engine):
            assert answers(llm, 60) == without_drafts
            assert llm.engine.scheduler.speculation
            found = llm.engine.scheduler.speculation.stats
            stats.append((found.drafts, found.draft_tokens, found.accepted_at))
    assert stats[0] == stats[1] and any(stats[0][2])


def test_weight_update_and_sleep_keep_heads(
    simple: tuple[Path, dict[str, Path]], without_drafts: list[Any], tmp_path: Path
) -> None:
    folder, heads = simple
    llm = LLM(folder, speculative_config=speculative(heads["eagle3"]), **OPTIONS)
    shutil.copytree(folder, tmp_path / "same")
    llm.update_weights(tmp_path / "same")
    assert answers(llm, 60) == without_drafts
    llm.sleep(2)
    llm.wake_up()
    assert answers(llm, 60) == without_drafts
    stats = llm.engine.scheduler.speculation.stats  # type: ignore[union-attr]
    assert stats.accepted_tokens > 0.1 * stats.draft_tokens > 20


def test_heads_in_model_folder_and_in_pytorch_file_are_loaded(
    simple: tuple[Path, dict[str, Path]], without_drafts: list[Any], tmp_path: Path
) -> None:
    folder, heads = simple
    weights = load_file(heads["medusa"] / "model.safetensors")
    combined, separate = tmp_path / "combined", tmp_path / "separate"
    shutil.copytree(folder, combined)
    save_file(load_file(folder / "model.safetensors") | weights, combined / "model.safetensors", {"format": "pt"})
    assert (
        answers(LLM(combined, speculative_config={"method": "medusa", "adaptive": False}, **OPTIONS), 60)
        == without_drafts
    )
    shutil.copytree(heads["medusa"], separate, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({name.removeprefix("medusa_head."): weight for name, weight in weights.items()}, separate / MEDUSA_FILE)
    assert answers(LLM(folder, speculative_config=speculative(separate), **OPTIONS), 60) == without_drafts


@pytest.mark.parametrize(
    ("method", "change", "options", "message"),
    [
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": None},
            {},
            r"inputs of layers \[2, 3, 3\] .* different layers from 0 to 5",
        ),
        ("eagle3", {"num_hidden_layers": 2}, {}, "heads with one layer are supported"),
        ("eagle3", {"vocab_size": 300}, {}, "the head has vocab_size 300, the model 60"),
        ("eagle3", {"hidden_size": None}, {}, "fc.weight has shape"),
        ("eagle3", {"intermediate_size": 128}, {}, "midlayer.mlp.gate_proj.weight has shape"),
        (
            "eagle",
            {},
            {"pipeline_parallel_size": 2},
            "with pipeline_parallel_size > 1, only the methods suffix and ngram",
        ),
        ("medusa", {"truncated_vocab_size": 30}, {}, "the Medusa heads have a vocabulary of 30, the model 60"),
    ],
)
def test_mismatched_heads_are_refused(
    simple: tuple[Path, dict[str, Path]],
    tmp_path: Path,
    method: str,
    change: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    folder, heads = simple
    head = tmp_path / "head"
    shutil.copytree(heads[method], head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(PenstockError, match=message):
        LLM(folder, speculative_config=speculative(head, method), **OPTIONS | options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle3"}, "set it to the folder of the eagle3 heads"),
        ({"method": "medusa"}, "has no medusa heads"),
        ({"method": "eagle3", "model": "HEAD/medusa"}, "layers|has no tensor"),
        ({"method": "medusa", "model": "HEAD/eagle"}, "has no medusa heads"),
        ({"method": "mtp", "model": "HEAD/eagle"}, "model cannot be set with the method mtp"),
    ],
)
def test_missing_heads_are_refused(simple: tuple[Path, Any], given: dict[str, str], message: str) -> None:
    given = {name: value.replace("HEAD", str(simple[0])) for name, value in given.items()}
    with pytest.raises(PenstockError, match=message):
        LLM(simple[0], speculative_config=given, **OPTIONS)


DEEPSEEK_MODULES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
DEEPSEEK = dict.fromkeys(DEEPSEEK_MODULES, "model.layers.3.{}") | {"": "model.layers.3"}
ERNIE = {
    "enorm": "model.mtp_emb_norm.0",
    "hnorm": "model.mtp_hidden_norm.0",
    "eh_proj": "model.mtp_linear_proj.0",
    "": "model.mtp_block.0",
}
EXPERTS = {"moe_intermediate_size": 48}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("config", "layer", "names"),
    [
        (Ernie4_5Config(**SMALL, head_dim=16), 0, ERNIE),
        (Ernie4_5_MoeConfig(**SMALL, **EXPERTS, moe_num_experts=4, moe_k=2, moe_layer_start_index=1), 0, ERNIE),
        (Glm4MoeConfig(**SMALL, **EXPERTS, head_dim=16, n_routed_experts=4, num_experts_per_tok=2), 2, DEEPSEEK),
    ],
    ids=lambda each: getattr(each, "model_type", ""),
)
def test_mtp_layers_are_loaded_under_names_of_family(
    config: PreTrainedConfig, layer: int, names: dict[str, str], tmp_path: Path
) -> None:
    """The models' next token depends on the last token only.

    Args:
        layer: index of the decoder layer whose weights are copied to the MTP layer.
        names: module names in the checkpoint; "" is the MTP layer itself.
    """
    save(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        if name.startswith(f"model.layers.{layer}."):
            tensors[name.replace(f"model.layers.{layer}", names[""])] = tensor.clone()
    made = {
        "enorm": torch.ones(SIZE),
        "hnorm": torch.ones(SIZE),
        "eh_proj": torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1),
        "shared_head.norm": tensors["model.norm.weight"].clone(),
    }
    tensors |= {f"{names[part].format(part)}.weight": each for part, each in made.items() if part in names}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(written))
    mtp = [tensor for name, tensor in tensors.items() if name.startswith(names[""]) or names["eh_proj"] in name]
    assert model_size_of(written).mtp_weights == sum(tensor.numel() for tensor in mtp if tensor.dim() > 1)
    tree = {"speculative_token_tree": "[(0, 0), (0, 1), (1,)]"} if names is DEEPSEEK else {}
    llm = LLM(tmp_path, speculative_config={"method": "mtp", "adaptive": False, **tree}, **OPTIONS)
    assert answers(llm) == answers(LLM(tmp_path, speculation=False, **OPTIONS))
    stats = llm.engine.scheduler.speculation.stats  # type: ignore[union-attr]
    assert stats.accepted_tokens > (0.4 if tree else 0.9) * stats.draft_tokens > 20
