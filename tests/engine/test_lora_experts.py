"""LoRA adapters of MoE experts, with random weights, compared with PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from penstock import LLM, LoRARequest, PenstockError, SamplingParams
from penstock.core import Code

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "num_gpu_blocks_override": 100,
    "weight_cache_dir": "none",
    "max_model_len": 256,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=48, num_experts_per_tok=3, num_local_experts=8, sliding_window=None
    ),
    "gpt-oss": GptOssConfig(
        **SMALL | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2, head_dim=32
    ),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": BOTH},
    "down": {"r": 2, "lora_alpha": 6, "use_rslora": True, "target_modules": [], "target_parameters": BOTH[1:]},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["o_proj"],
        "target_parameters": BOTH,
        "rank_pattern": {"experts.gate_up_proj": 6},
        "alpha_pattern": {r"model\.layers\.1\.mlp\.experts\.down_proj": 12},
    },
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
}


@pytest.fixture(scope="module", params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model with the adapters ``ADAPTERS``, whose weights are large enough to change the output."""
    folder = tmp_path_factory.mktemp("base")
    save(CONFIGS[request.param], folder)
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        changed = get_peft_model(model, LoraConfig(**config))
        for key, parameter in changed.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
        changed.save_pretrained(folder / name)
    return folder


def random_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


def log_probabilities(base: Path, adapter: Path | None, tokens: list[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        table: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return table


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_logprobs_and_greedy_tokens_equal_peft(base: Path, ops: str) -> None:
    """The batch has requests for every adapter and for no adapter, computed in chunks."""
    llm = LLM(base, dtype="float32", ops=ops, enable_lora=True, max_num_batched_tokens=50, **OPTIONS)
    requests = [*(LoRARequest(name, i, str(base / name)) for i, name in enumerate(ADAPTERS, 1)), None]
    prompts = [random_prompt(0, 40) for _ in requests]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    distinct_outputs = set()
    for prompt, request, output in zip(prompts, requests, outputs, strict=True):
        (made,) = output.outputs
        table = log_probabilities(base, Path(request.lora_path) if request else None, prompt + made.token_ids)
        assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == made.token_ids
        logprobs = [*(output.prompt_logprobs or [])[1:], *(made.logprobs or [])]
        for row, position in zip(table, logprobs, strict=False):
            assert position
            for token_id, found in position.items():
                assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        distinct_outputs.add(tuple(made.token_ids))
    assert len(distinct_outputs) == len(requests), "two adapters gave the same output"


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "w8a8"}], ids=str)
def test_bits_do_not_depend_on_batch_and_other_adapters(base: Path, options: dict[str, Any]) -> None:
    """Requests without an adapter have the bits of the base model. Requests with an attention-only adapter have the
    same bits whether or not expert adapters are loaded."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    prompts = [random_prompt(seed, 10 + 7 * seed) for seed in range(2)]

    def ask(llm: LLM, names: list[str | None]) -> list[Any]:
        requests = [(prompt, LoRARequest(name) if name else None) for name in names for prompt in prompts]
        outputs = llm.generate([p for p, _ in requests], params, use_tqdm=False, lora_request=[r for _, r in requests])
        return [(output.outputs, output.prompt_logprobs) for output in outputs]

    plain = ask(LLM(base, **options, **OPTIONS), [None])
    llm = LLM(base, enable_lora=True, enable_prefix_caching=False, **options, **OPTIONS)
    llm.load_lora_adapter("attention", base / "attention")
    attention = ask(llm, ["attention"])
    for name in ("both", "down"):
        llm.load_lora_adapter(name, base / name)
    alone = [ask(llm, [name]) for name in ("both", "down")]
    mixed = ask(llm, [None, "both", "attention", "down"])
    assert mixed == [*plain, *alone[0], *attention, *alone[1]]
    assert alone[0] != plain
    for name in ("both", "down"):
        llm.unload_lora_adapter(name)
    assert ask(llm, ["attention", None]) == [*attention, *plain]


def separate(base: Path, folder: Path) -> None:
    """Save the adapter "both" with a separate module per expert, named like the checkpoint's matrices."""
    config = json.loads((base / "both" / "adapter_config.json").read_text())
    mixtral = json.loads((base / "config.json").read_text())["model_type"] == "mixtral"
    module, projections = (
        ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    tensors, made = load_file(base / "both" / "adapter_model.safetensors"), {}
    for key, a in tensors.items():
        if ".experts." not in key:
            made[key] = a
        elif key.endswith(".lora_A.weight"):
            prefix = key.removesuffix(".lora_A.weight")
            b, rank = tensors[f"{prefix}.lora_B.weight"], config["r"]
            name = prefix.removesuffix(".base_layer").replace("mlp.experts", f"{module}.experts")
            for expert in range(len(a) // rank):
                parts = b[:, expert :: len(a) // rank].chunk(1 if len(b) == 64 else 2)
                for projection, part in zip(projections[2:] if len(b) == 64 else projections[:2], parts, strict=True):
                    made[f"{name}.{expert}.{projection}.lora_A.weight"] = a[expert * rank : (expert + 1) * rank].clone()
                    made[f"{name}.{expert}.{projection}.lora_B.weight"] = part.clone()
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    config |= {"target_parameters": None, "target_modules": ["q_proj", *projections]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def exchange(base: Path, folder: Path) -> None:
    """Save the adapter "both" in the format of PEFT versions that exchanged inputs and outputs of expert parameters,
    with the tensor names of models with image input."""
    shutil.copytree(base / "both", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in [key for key in tensors if ".experts." in key and key.endswith(".lora_A.weight")]:
        other, rank = key.replace("lora_A", "lora_B"), 4
        a, b = tensors[key], tensors[other]
        tensors[key] = b.unflatten(1, (rank, -1)).permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = a.unflatten(0, (-1, rank)).permute(2, 1, 0).flatten(1, 2).contiguous()
    renamed = {key.replace("model.layers", "model.language_model.layers"): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("mixtral", {}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"tensor_parallel_size": 2}),
        ("qwen3-moe", {"pipeline_parallel_size": 2}),
    ],
    indirect=["base"],
    ids=str,
)
def test_other_formats_of_an_adapter_give_same_outputs(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Formats: matrices of separate experts, and matrices with inputs and outputs exchanged; on one and two ranks."""
    separate(base, tmp_path / "separate")
    exchange(base, tmp_path / "exchanged")
    modules = (f"both={base / 'both'}", *(f"{name}={tmp_path / name}" for name in ("separate", "exchanged")))
    llm = LLM(base, dtype="float32", lora_modules=modules, **options, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    requests = [LoRARequest(name) for name in ("both", "separate", "exchanged")]
    prompt = random_prompt(0, 40)
    both, *others = llm.generate([prompt] * 3, params, use_tqdm=False, lora_request=requests)
    for other in others:
        assert (other.outputs, other.prompt_logprobs) == (both.outputs, both.prompt_logprobs)
    made = both.outputs[0].token_ids
    table = log_probabilities(base, tmp_path / "separate", prompt + made)
    assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == made
    for row, position in zip(table, (both.prompt_logprobs or [])[1:], strict=False):
        assert position
        for token_id, found in position.items():
            assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-4)


def test_invalid_expert_adapter_is_refused_with_reason(base: Path, tmp_path: Path) -> None:
    llm = LLM(base, enable_lora=True, max_lora_rank=4, **OPTIONS)

    def refused(message: str, code: Code, parameters: list[str], change: Any = None, llm: LLM = llm) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        config = json.loads((base / "both" / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": parameters}))
        tensors = load_file(base / "both" / "adapter_model.safetensors")
        expert_keys = sorted(key for key in tensors if ".experts." in key)
        if change:
            change(tensors, expert_keys)
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(PenstockError, match=message) as error:
            llm.load_lora_adapter("a", folder)
        assert error.value.failure.code == code

    def shorten(tensors: dict[str, Any], keys: list[str]) -> None:
        tensors[keys[0]] = tensors[keys[0]][:, :-1].contiguous()

    def remove_first(tensors: dict[str, Any], keys: list[str]) -> None:
        del tensors[keys[0]]

    refused("target_parameters .*gate.weight", Code.UNSUPPORTED, ["mlp.gate.weight"])
    refused("does not fit", Code.UNSUPPORTED, BOTH, shorten)
    refused("does not fit", Code.UNSUPPORTED, BOTH, remove_first)
    with pytest.raises(PenstockError, match=r"rank 6 .* \(max_lora_rank\)"):
        llm.load_lora_adapter("a", base / "patterns")


@pytest.mark.parametrize("base", ["qwen3-moe"], indirect=True)
def test_expert_parallelism_refuses_expert_adapters(base: Path) -> None:
    llm = LLM(base, enable_lora=True, tensor_parallel_size=2, enable_expert_parallel=True, **OPTIONS)
    llm.load_lora_adapter("attention", base / "attention")
    with pytest.raises(PenstockError, match="without enable_expert_parallel"):
        llm.load_lora_adapter("both", base / "both")


@pytest.mark.parametrize("base", ["qwen3-moe"], indirect=True)
def test_weight_update_keeps_expert_adapters(base: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(base, changed)
    tensors = load_file(base / "model.safetensors")
    scaled = {name: tensor * 1.1 if "experts" in name else tensor for name, tensor in tensors.items()}
    save_file(scaled, changed / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {"dtype": "float32", "lora_modules": (f"both={base / 'both'}",), **OPTIONS}
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)

    def ask(llm: LLM) -> list[Any]:
        chosen = [LoRARequest("both"), None]
        outputs = llm.generate([random_prompt(0, 40)] * 2, params, use_tqdm=False, lora_request=chosen)
        return [output.outputs[0].logprobs for output in outputs]

    llm = LLM(base, **options)
    before = ask(llm)
    llm.update_weights(str(changed))
    after = ask(llm)
    assert after == ask(LLM(changed, **options))
    assert after != before
    llm.unload_lora_adapter("both")
    llm.load_lora_adapter("both", base / "both")
    assert ask(llm) == after
