"""Heads that draft from the model's hidden states: EAGLE, Medusa, against their definition in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import SMALL, save
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from penstock import LLM, SamplingParams
from penstock.core import EngineRequest

VOCAB, SIZE, LAYERS = 300, 64, 6
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
Drafted = Callable[[list[int], int], list[int]]
"""The greedy draft of some tokens after a sequence."""


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
    return answers(LLM(target, **OPTIONS))


def answers(llm: LLM) -> list[Any]:
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def speculative(folder: Path, method: str = "", **more: Any) -> dict[str, Any]:
    return {"model": str(folder), "adaptive": False, "num_speculative_tokens": 4} | ({"method": method} | more)


# --- Heads, and their definition --------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def layer(weights: dict[str, Tensor], name: str, x: Tensor, residual: Tensor) -> Tensor:
    """The decoder layer after its input norm, over whole sequences ``[length, inputs]`` with rotary positions."""
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


def write(folder: Path, weights: dict[str, Tensor], architecture: str, **config: Any) -> None:
    own = {name: value for name, value in CONFIG.to_dict().items() if name in SMALL}
    own |= {"architectures": [architecture], "model_type": "llama", "rms_norm_eps": 1e-6, "num_hidden_layers": 1}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(own | config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def chain(
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], states: Tensor, tokens: list[int], count: int
) -> list[int]:
    """Draft one token after the other.

    Args:
        step: takes states ``[length, hidden]`` and the next token of each; returns the new states, and the last
            position's logits.
        states: of all tokens but the last.
    """
    drafted: list[int] = []
    for _ in range(count):
        new, logits = step(states, torch.tensor((tokens + drafted)[1:]))
        states = torch.cat((states, new[-1:]))
        drafted.append(int(logits.argmax()))
    return drafted


def eagle3(folder: Path, model: PreTrainedModel, variant: str) -> Drafted:
    """A random EAGLE-3 head: ``published``, or with a vocabulary and embedding of its own, or as ``speculators`` has
    them."""
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
    if variant == "own vocabulary":
        target_ids = torch.randperm(VOCAB)[:100].sort().values
        weights["d2t"] = target_ids - torch.arange(100)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, target_ids, True)
        weights["lm_head.weight"] = head = head[target_ids].clone()
        weights["embed_tokens.weight"] = embedding = torch.randn(VOCAB, SIZE) * 0.2
        config["draft_vocab_size"] = 100
    write(folder, weights, "LlamaForCausalLMEagle3", **config)

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


def eagle(folder: Path, model: PreTrainedModel, variant: str) -> Drafted:
    """A random head of EAGLE-1."""
    torch.manual_seed(2)
    weights = {"fc.weight": torch.randn(SIZE, 2 * SIZE) * 0.1, **random_layer("layers.0", SIZE)}
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.data.clone()
    if variant == "bias":
        weights["fc.bias"] = torch.randn(SIZE)
    write(folder, weights, "EagleLlamaForCausalLM")

    def step(states: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((weights["embed_tokens.weight"][following], states), -1)
        x = F.linear(both, weights["fc.weight"], weights.get("fc.bias"))
        new = layer(weights, "layers.0", x, x)
        return new, model.lm_head(new[-1])

    def drafted(tokens: list[int], count: int) -> list[int]:
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        return chain(step, states, tokens, count)

    return torch.inference_mode()(drafted)


def medusa(folder: Path, model: PreTrainedModel, variant: str) -> Drafted:
    """Three random Medusa heads, in the published layout or in vLLM's."""
    torch.manual_seed(3)
    num_layers = 2 if variant == "vLLM" else 1
    blocks = [[(torch.randn(SIZE, SIZE) * 0.2, torch.randn(SIZE)) for _ in range(num_layers)] for _ in range(3)]
    heads = [torch.randn(VOCAB, SIZE) for _ in blocks]
    weights: dict[str, Tensor] = {}
    for i, (own, head) in enumerate(zip(blocks, heads, strict=True)):
        for j, (weight, bias) in enumerate(own):
            name = f"blocks.{i}.layers.{j}" if variant == "vLLM" else f"medusa_head.{i}.{j}.linear"
            weights |= {f"{name}.weight": weight, f"{name}.bias": bias}
        weights[f"lm_heads.{i}.weight" if variant == "vLLM" else f"medusa_head.{i}.1.weight"] = head
    write(folder, weights, "MedusaModel")

    def drafted(tokens: list[int], count: int) -> list[int]:
        state, result = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1], []
        for own, head in list(zip(blocks, heads, strict=True))[:count]:
            x = state
            for weight, bias in own:
                x = x + F.silu(F.linear(x, weight, bias))
            result.append(int(F.linear(x, head).argmax()))
        return result

    return torch.inference_mode()(drafted)


HEADS = [
    (eagle3, "eagle3", "published"),
    (eagle3, "eagle3", "own vocabulary"),
    (eagle3, "eagle3", "speculators"),
    (eagle, "eagle", "no bias"),
    (eagle, "eagle", "bias"),
    (medusa, "medusa", "published"),
    (medusa, "medusa", "vLLM"),
]


def NAMES(each: Any) -> str:
    return each if isinstance(each, str) else ""


@pytest.mark.parametrize(("make", "method", "variant"), HEADS, ids=NAMES)
def test_drafts_are_those_of_the_definition(
    target: Path, model: PreTrainedModel, tmp_path: Path, make: Any, method: str, variant: str
) -> None:
    drafted = make(tmp_path / "head", model, variant)
    given = speculative(tmp_path / "head")  # the method is found out
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


@pytest.mark.parametrize(("make", "method", "variant"), [HEADS[1], HEADS[4], HEADS[5]], ids=NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 24},
        {"num_gpu_blocks_override": 24, "preemption_mode": "swap", "swap_space": 0.01},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_outputs_are_those_without_drafts(
    target: Path,
    model: PreTrainedModel,
    plain: list[Any],
    tmp_path: Path,
    make: Any,
    method: str,
    variant: str,
    options: dict[str, Any],
) -> None:
    make(tmp_path / "head", model, variant)
    with LLM(target, speculative_config=speculative(tmp_path / "head", method), **OPTIONS | options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert answers(llm) == plain
        speculation = llm.engine.scheduler.speculation
        assert speculation and speculation.stats.draft_tokens > speculation.stats.accepted_tokens
