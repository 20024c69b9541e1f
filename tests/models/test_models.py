"""Llama, Mistral and Qwen with random weights in ``LLM``, compared with transformers; broken checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from penstock import demo
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM

ROPE = {"rope_theta": 10_000.0}
LONGER = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"rope_type": kind} | parameters}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama, all heads, tied": LlamaConfig(**SMALL | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama, linear rope": LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "llama, llama3 rope": LlamaConfig(**SMALL, **rope("llama3", **LONGER, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn rope": LlamaConfig(**SMALL, **rope("yarn", **LONGER)),
    "mistral, window": MistralConfig(**SMALL, sliding_window=24, head_dim=32),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, window in later layers": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    return str(request.param)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(
    request: pytest.FixtureRequest, ops: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LLM, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save(CONFIGS[request.param], folder)
    options = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100, "max_num_batched_tokens": 50}
    return LLM(folder, ops=ops, **options), model


def draw(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


PROMPTS = [draw(length, length) for length in (1, 7, 40, 100)]


@pytest.mark.slow_after(5)
def test_logprobs_and_greedy_tokens_match_transformers(pair: tuple[LLM, PreTrainedModel]) -> None:
    """Penstock runs a batch, in chunks of at most 50 tokens and blocks of 16; transformers runs one sequence at a
    time."""
    llm, model = pair
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        (completion,) = output.outputs
        with torch.inference_mode():
            table = model(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
        assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids
        reported = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        for row, token, position in zip(table, (prompt + completion.token_ids)[1:], reported, strict=False):
            assert position is not None
            assert next(iter(position)) == token
            for token_id, found in position.items():
                assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
                assert (row > row[token_id] + 1e-4).sum() < found.rank <= (row > row[token_id] - 1e-4).sum()


@pytest.mark.slow_after(4)
@torch.inference_mode()
def test_bfloat16_error_is_near_that_of_transformers(pair: tuple[LLM, PreTrainedModel], tmp_path: Path) -> None:
    """Compares the errors of the prompt's log probabilities, relative to transformers in float32."""
    llm, exact = pair
    exact.save_pretrained(tmp_path)
    rough = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, tmp_path)
    ours = LLM(tmp_path, dtype="bfloat16", ops=llm.options.ops, block_size=16, num_gpu_blocks_override=100)
    prompts = [draw(seed, 200) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    errors = torch.zeros(2, dtype=torch.float64)
    for prompt, output in zip(prompts, ours.generate(prompts, params, use_tqdm=False), strict=True):
        expected, theirs = (
            model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[range(199), prompt[1:]]
            for model in (exact, rough)
        )
        reported = [
            found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()
        ]
        errors += torch.tensor([float((got - expected).square().sum()) for got in (torch.tensor(reported), theirs)])
    our_error, their_error = errors.sqrt().tolist()
    assert our_error <= 1.2 * their_error


def test_dynamic_rope_is_computed_at_load_for_max_model_len(tmp_path: Path) -> None:
    """Sequences of that length are compared, as transformers' table changes with the length of the sequence."""
    model = save(LlamaConfig(**SMALL | {"max_position_embeddings": 64}, **rope("dynamic", factor=4.0)), tmp_path)
    llm = LLM(tmp_path, max_model_len=120, num_gpu_blocks_override=4)
    prompt = draw(0, 119)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    with torch.inference_mode():
        table = model(torch.tensor([prompt + output.outputs[0].token_ids])).logits[0].log_softmax(-1)
    reported = [found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()]
    assert reported == pytest.approx(table[range(118), prompt[1:]].tolist(), abs=1e-4)


def test_sharded_checkpoint_generates_tokens_of_transformers(tmp_path: Path) -> None:
    model = save(CONFIGS["qwen3"], tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = model.generate(torch.tensor(PROMPTS[1:2]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    outputs = LLM(tmp_path, num_gpu_blocks_override=8).generate([PROMPTS[1]], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected[0, len(PROMPTS[1]) :].tolist()


def test_single_safetensors_file_may_have_another_name(tmp_path: Path) -> None:
    """AutoGPTQ writes such files."""
    save(CONFIGS["qwen3"], tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert LLM(tmp_path, num_gpu_blocks_override=8).generate("A", SamplingParams(max_tokens=1), use_tqdm=False)
    (tmp_path / "gptq_model-4bit-128g.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(PenstockError, match=r"has no model\.safetensors"):
        LLM(tmp_path, num_gpu_blocks_override=8)


def break_checkpoint(folder: Path, how: str) -> None:
    match how:
        case "unknown architecture":
            text = (folder / "config.json").read_text().replace("Qwen3ForCausalLM", "Qwen9ForCausalLM")
            (folder / "config.json").write_text(text)
        case "missing tensor":
            text = (folder / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
            (folder / "config.json").write_text(text.replace('"full_attention",', '"full_attention", ' * 2, 1))
        case "wrong shape":
            text = (folder / "config.json").read_text().replace('"intermediate_size": 96', '"intermediate_size": 97')
            (folder / "config.json").write_text(text)
        case "truncated":
            path = folder / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-1000])
        case "only pickles":
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        case "other pickles":
            (folder / "model.safetensors").rename(folder / "model.pt")
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "uneven heads":
            text = (folder / "config.json").read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 3')
            (folder / "config.json").write_text(text)
        case "wrong kind":
            text = (folder / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": [3]')
            (folder / "config.json").write_text(text)
        case str() if "=" in how:
            name, value = how.split("=")
            config = json.loads((folder / "config.json").read_text())
            within = config["rope_parameters"] if name == "rope_theta" else config
            within[name] = json.loads(value)
            (folder / "config.json").write_text(json.dumps(config))
        case "dtype: load" | "head_dim: -4" | "num_key_value_heads: x":
            name, value = how.split(": ")
            config = json.loads((folder / "config.json").read_text())
            config[name] = int(value) if name == "head_dim" else value
            (folder / "config.json").write_text(json.dumps(config))
        case "broken config":
            (folder / "config.json").write_text("{")
        case "deep config":
            (folder / "config.json").write_text("[" * 10**6)
        case "no object":
            (folder / "config.json").write_text("[]")
        case "integers":
            path = folder / "model.safetensors"
            whole = load_file(path)
            save_file(whole | {"model.norm.weight": whole["model.norm.weight"].to(torch.int32)}, path)
        case "broken index" | "index without files" | "index of numbers":
            text = {"broken index": "[" * 10**6, "index without files": "{}"}.get(how, '{"weight_map": {"x": 5}}')
            (folder / "model.safetensors.index.json").write_text(text)
        case "index of files elsewhere":
            index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "broken defaults":
            (folder / "generation_config.json").write_text("[1]")
        case "odd ends":
            (folder / "generation_config.json").write_text('{"eos_token_id": [[1]]}')
        case "odd special token":
            (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')


@pytest.mark.slow_after(11)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown architecture", "Qwen9ForCausalLM is not supported; supported:"),
        ("missing tensor", r"no tensor model\.layers\.3"),
        ("wrong shape", r"shape \(96, 64\); config.json requires \(97, 64\)"),
        ("truncated", "is damaged"),
        ("only pickles", r"pytorch_model\.bin is damaged, or a pickle from before"),
        ("other pickles", r"only as pickles \(model\.pt\).*not loaded. Convert them"),
        ("no weights", r"has no model\.safetensors"),
        ("uneven heads", "num_attention_heads is 4; it must be a multiple of num_key_value_heads, 3"),
        ("wrong kind", "num_hidden_layers is .*; it must be a whole number"),
        ("dtype: load", "an invalid value: dtype is 'load'"),
        ("head_dim: -4", "head_dim is -4; it must be a whole number from 0"),
        ("num_key_value_heads: x", "num_key_value_heads is 'x'; it must be a whole number"),
        ("rope_theta=NaN", "rope_parameters.rope_theta is nan; it must be a number from"),
        ("rope_theta=-10000", "rope_theta is -10000; it must be"),
        ("rms_norm_eps=NaN", "rms_norm_eps is nan; it must be"),
        ("rms_norm_eps=-1e-6", "rms_norm_eps is -1e-06; it must be"),
        ("sliding_window=-5", "sliding_window is -5; it must be"),
        ("head_dim=1000000", "head_dim is 1000000; it must be"),
        ("num_hidden_layers=0", "num_hidden_layers is 0; it must be"),
        ('num_key_value_heads="2"', "num_key_value_heads is '2'; it must be"),
        ("eos_token_id=1000000000", "eos_token_id is 1000000000; it must be"),
        ('tie_word_embeddings="no"', "tie_word_embeddings is 'no'; it must be true or false"),
        ("broken config", "is not JSON"),
        ("deep config", "is not JSON"),
        ("no object", "config.json is not a JSON object"),
        ("integers", r"tensor model\.norm\.weight has dtype torch\.int32"),
        ("broken index", r"index\.json is damaged"),
        ("index without files", r"index\.json is damaged"),
        ("index of numbers", r"index\.json is damaged"),
        ("index of files elsewhere", r"names '\.\./model\.safetensors'; it must name a file in the same folder"),
        ("broken defaults", r"generation_config\.json is not a JSON object"),
        ("odd ends", r"generation_config\.json: eos_token_id is \[\[1\]\]; it must be"),
        ("odd special token", r"tokenizer_config\.json is not JSON"),
    ],
)
def test_broken_checkpoint_is_refused(tmp_path: Path, how: str, message: str) -> None:
    save(CONFIGS["qwen3"], tmp_path)
    break_checkpoint(tmp_path, how)
    with pytest.raises(PenstockError, match=message):
        LLM(tmp_path, num_gpu_blocks_override=8)


def test_null_fields_of_config_have_defaults(tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    plain = LLM(tmp_path, num_gpu_blocks_override=8).generate([PROMPTS[1]], SamplingParams(temperature=0))
    nulls = {"quantization_config": None, "rope_scaling": None, "tie_word_embeddings": None, "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(config | nulls))
    again = LLM(tmp_path, num_gpu_blocks_override=8).generate([PROMPTS[1]], SamplingParams(temperature=0))
    assert again[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_float16_checkpoint_runs_on_a_cpu(tmp_path: Path) -> None:
    model = save(CONFIGS["llama"], tmp_path)
    model.half().save_pretrained(tmp_path)
    (output,) = LLM(tmp_path, num_gpu_blocks_override=8).generate([PROMPTS[1]], SamplingParams(max_tokens=2))
    assert output.finished


@pytest.mark.slow
def test_dummy_weights_depend_on_the_seed(tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def generate(seed: int) -> list[int]:
        llm = LLM(tmp_path, load_format="dummy", seed=seed, num_gpu_blocks_override=8)
        return llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0].token_ids

    assert generate(1) == generate(1) != generate(2)
