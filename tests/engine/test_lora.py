"""LoRA adapters with random weights, compared with PEFT: alone, several in a batch, loaded and unloaded at run time."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
import storm
import torch
from checkpoints import SMALL, save
from executors import engine_options
from peft import LoraConfig, PeftModel, get_peft_model
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from serving import Served, Servers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from penstock import LLM, AsyncLLM, LoRARequest, PenstockError, demo
from penstock.core import Code, EngineRequest, SamplingParams
from penstock.engine.engine import Engine

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "everywhere": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rank-stabilized": {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": ["v_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 16, r"layers\.1\.mlp\..*": 2},
        "alpha_pattern": {"layers.0.self_attn.o_proj": 12},
        "layers_to_transform": [0, 1],
    },
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, head_dim=32, sliding_window=None),
    "llama, biases, whole panels": LlamaConfig(
        **SMALL | {"intermediate_size": 128}, attention_bias=True, mlp_bias=True
    ),
}
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}


def adapter(base: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Save an adapter with random weights large enough to change the output; return its folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    changed = get_peft_model(model, LoraConfig(**ADAPTERS["everywhere"] | config, init_lora_weights=False))
    changed.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save(CONFIGS[request.param], folder)
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        adapter(folder, folder / name, seed, **config)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two adapters, ``a`` and ``b``."""
    folder = tmp_path_factory.mktemp("small")
    save(CONFIGS["qwen3"], folder)
    for seed, name in enumerate("ab"):
        adapter(folder, folder / name, seed)
    return folder


def random_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_logprobs_and_greedy_tokens_equal_peft(base: Path, ops: str) -> None:
    """The batch has requests for three adapters and for no adapter, computed in chunks."""
    if ops == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    llm = LLM(base, dtype="float32", ops=ops, enable_lora=True, max_num_batched_tokens=50, **OPTIONS)
    prompts = [random_prompt(length, length) for length in (1, 40, 100) for _ in range(4)]
    chosen = [*(LoRARequest(name, i, str(base / name)) for i, name in enumerate(ADAPTERS, 1)), None] * 3
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    token_ids = {}
    for prompt, request, output in zip(prompts, chosen, outputs, strict=True):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if request:
            model = PeftModel.from_pretrained(model, request.lora_path)
        (made,) = output.outputs
        with torch.inference_mode():
            table = model(torch.tensor([prompt + made.token_ids])).logits[0].log_softmax(-1)
        assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == made.token_ids
        logprobs = [*(output.prompt_logprobs or [])[1:], *(made.logprobs or [])]
        for row, position in zip(table, logprobs, strict=False):
            assert position
            for token_id, found in position.items():
                assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        token_ids[request, len(prompt)] = made.token_ids
    assert len({tuple(token_ids[request, 100]) for request in chosen}) == 4, "two adapters gave the same output"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "w8a8"}], ids=str)
def test_requests_without_adapter_have_bits_of_base_model(base: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    prompts = [random_prompt(seed, 10 + seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    plain = LLM(base, **options, **OPTIONS).generate(prompts, params, use_tqdm=False)
    llm = LLM(base, lora_modules=(f"a={base / 'everywhere'}",), **options, **OPTIONS)
    chosen = [None, LoRARequest("a")] * 6
    mixed = llm.generate([prompt for prompt in prompts for _ in "12"], params, use_tqdm=False, lora_request=chosen)
    for expected, output, adapted in zip(plain, mixed[::2], mixed[1::2], strict=True):
        assert (output.outputs, output.prompt_logprobs) == (expected.outputs, expected.prompt_logprobs)
        assert adapted.prompt_logprobs != expected.prompt_logprobs


def test_adapter_reloaded_under_same_name_finds_no_old_prefix(small: Path) -> None:
    llm = LLM(small, enable_lora=True, max_loras=1, **OPTIONS)
    prompt, params = random_prompt(0, 100), SamplingParams(temperature=0, max_tokens=4, logprobs=0)

    def ask(name: str | None) -> tuple[Any, int]:
        chosen = LoRARequest(name) if name else None
        (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=chosen)
        return output.outputs[0].logprobs, output.num_cached_tokens

    llm.load_lora_adapter("one", small / "a")
    a, cached = ask("one")
    assert cached == 0
    assert ask("one") == (a, 96)
    llm.unload_lora_adapter("one")
    llm.load_lora_adapter("one", small / "b")
    b, cached = ask("one")
    assert (b != a, cached) == (True, 0)
    assert ask(None)[1] == 0
    llm.unload_lora_adapter("one")
    llm.load_lora_adapter("other", small / "a")
    assert ask("other") == (a, 96), "equal contents under another name share prefixes"


def test_unload_lets_requests_end_and_then_frees_slot(small: Path) -> None:
    fixed = engine_options(model=str(small), lora_modules=(f"a={small / 'a'}",), max_loras=1, **OPTIONS)

    def run(engine: Engine, interfere: bool) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        engine.add(EngineRequest(request_id="1", prompt=random_prompt(0, 20), sampling=sampling, adapter="a"))
        tokens: list[int] = []
        while engine.busy:
            tokens += [token for delta in engine.step() for token in delta.token_ids]
            if interfere and len(tokens) == 5:
                engine.adapters.unload("a")
                with pytest.raises(PenstockError, match="not loaded"):
                    engine.add(EngineRequest(request_id="2", prompt=[5], sampling=sampling, adapter="a"))
                with pytest.raises(PenstockError, match="until the requests that use them end"):
                    engine.adapters.load("b", str(small / "b")).result()
        if interfere:
            engine.adapters.wait(engine.adapters.load("b", str(small / "b")))
            assert engine.adapters.paths == {"b": str(small / "b")}
        return tokens

    assert run(Engine(fixed), True) == run(Engine(fixed), False)


def test_adapters_with_equal_contents_share_a_slot(small: Path, tmp_path: Path) -> None:
    """A change of the adapter's config changes its key, which keeps its prefixes apart in the prefix cache."""
    copied = tmp_path / "copied"
    shutil.copytree(small / "a", copied)
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    options = OPTIONS | {"speculation": False}  # the callback below counts tokens
    engine = Engine(engine_options(model=str(small), enable_lora=True, max_loras=2, **options))
    adapters, sampling = engine.adapters, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def load(name: str, folder: Path) -> str:
        adapters.wait(adapters.load(name, str(folder)))
        return adapters.key(name)

    def run(name: str, interfere: Callable[[int], None] = lambda count: None) -> list[int]:
        tokens: list[int] = []
        engine.add(EngineRequest(request_id=name, prompt=random_prompt(0, 20), sampling=sampling, adapter=name))
        while engine.busy:
            tokens += [token for delta in engine.step() for token in delta.token_ids]
            interfere(len(tokens))
        return tokens

    def unload_and_reload(count: int) -> None:
        if count == 5:
            adapters.unload("a")
        elif count == 7:
            adapters.unload("copied")
            with pytest.raises(PenstockError, match="not loaded"):
                adapters.key("copied")
        elif count == 9:
            assert load("again", copied) == key

    key = load("a", small / "a")
    assert (
        Engine(engine_options(model=str(small), lora_modules=(f"x={copied}",), max_loras=1, **OPTIONS)).adapters.key(
            "x"
        )
        == key
    )
    expected = run("a")
    assert load("copied", copied) == key
    assert run("copied") == expected
    assert load("b", small / "b") != key, "another adapter has another key"
    assert run("b") != expected
    adapters.unload("b")
    assert run("a", unload_and_reload) == run("again") == expected
    (copied / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert load("changed", copied) != key
    assert run("changed") != expected
    for name in ("again", "changed"):
        adapters.unload(name)
    assert not adapters.has_pending
    for name in "ab":
        load(name, small / name)
    assert run("a") == expected


def test_adapter_unloaded_while_loading_fails_the_load(small: Path) -> None:
    """An engine restart can cause this order. The slot is free again after the load has failed."""
    engine = Engine(engine_options(model=str(small), enable_lora=True, max_loras=1, **OPTIONS))
    for _ in range(2):
        loading = engine.adapters.load("a", str(small / "a"))
        engine.adapters.unload("a")
        with pytest.raises(PenstockError, match="unloaded while it was being loaded"):
            engine.adapters.wait(loading)
        assert engine.adapters.paths == {}
        while engine.adapters.has_pending:
            engine.adapters.process_pending()
    engine.adapters.wait(engine.adapters.load("b", str(small / "b")))
    assert engine.adapters.paths == {"b": str(small / "b")}


def damage(folder: Path, kind: str) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    first = next(iter(tensors))
    match kind:
        case "no config":
            path.unlink()
            return
        case "broken config":
            path.write_text("{")
            return
        case "no weights":
            (folder / "adapter_model.safetensors").unlink()
        case "pickle":
            (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        case "damaged":
            (folder / "adapter_model.safetensors").write_bytes(b"?" * 100)
        case "other PEFT type":
            config["peft_type"] = "IA3"
        case "unsupported initialization":
            config["init_lora_weights"] = "pissa_niter_4"
        case "rank":
            config["r"] = 9
        case "other shape":
            tensors[first] = tensors[first][:, :-1].contiguous()
        case "missing tensor":
            del tensors[first]
        case "head":
            tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(8, 64)
        case "whole module":
            tensors["base_model.model.lm_head.weight"] = torch.zeros(300, 64)
        case "pattern":
            config["alpha_pattern"] = {"(": 3}
        case "exponential pattern":
            config["rank_pattern"] = {"(([a-z_.]+)+)+[0-9]": 3}
        case "slow pattern":
            config["rank_pattern"] = {".*.*.*.*.*.*.*.*[A-Z]": 3}
        case "many patterns":
            config["rank_pattern"] = {f".*{i}": 3 for i in range(1000)}
        case "text instead of number":
            config["lora_alpha"] = "much"
        case _:
            name, _, value = kind.partition("=")
            config[name] = json.loads(value)
    path.write_text(json.dumps(config))
    if (folder / "adapter_model.safetensors").exists() and kind != "damaged":
        save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("kind", "message", "code"),
    [
        ("no config", "has no adapter_config.json", Code.INVALID),
        ("broken config", "is not JSON", Code.INVALID),
        ("no weights", "has no adapter_model.safetensors", Code.INVALID),
        ("pickle", "a pickle", Code.INVALID),
        ("damaged", "is damaged", Code.INVALID),
        ("other PEFT type", "type IA3", Code.UNSUPPORTED),
        ("unsupported initialization", "pissa", Code.UNSUPPORTED),
        ("rank", r"must be \(9, 96\)", Code.INVALID),
        ("other shape", "for this model", Code.INVALID),
        ("missing tensor", "has no tensor", Code.INVALID),
        ("head", "lm_head", Code.UNSUPPORTED),
        ("whole module", "lm_head", Code.UNSUPPORTED),
        ("pattern", "an invalid regular expression", Code.INVALID),
        ("exponential pattern", "nested repetitions, or more than", Code.UNSUPPORTED),
        ("slow pattern", "nested repetitions, or more than", Code.UNSUPPORTED),
        ("many patterns", "1000 regular expressions; at most 64 are allowed", Code.INVALID),
        ("text instead of number", "they must be an integer and a number", Code.INVALID),
        ("r=200", r"rank 200 .* \(max_lora_rank\)", Code.INVALID),
        ("use_dora=true", "use_dora", Code.UNSUPPORTED),
        ('bias="all"', "bias", Code.UNSUPPORTED),
        ('modules_to_save=["lm_head"]', "modules_to_save", Code.UNSUPPORTED),
    ],
)
def test_invalid_adapter_is_refused_with_reason(
    small: Path, tmp_path: Path, kind: str, message: str, code: Code
) -> None:
    shutil.copytree(small / "a", tmp_path, dirs_exist_ok=True)
    damage(tmp_path, kind)
    with pytest.raises(PenstockError, match=message) as refused:
        LLM(small, lora_modules=(f"a={tmp_path}",), **OPTIONS)
    assert (refused.value.failure.code, refused.value.failure.field) == (code, "lora_path")


def test_invalid_adapter_calls_are_refused(small: Path) -> None:
    llm = LLM(small, enable_lora=True, max_loras=1, **OPTIONS)
    llm.load_lora_adapter("a", small / "a")
    llm.load_lora_adapter("a", small / "a")
    for call, message in (
        (lambda: llm.load_lora_adapter("a", small / "b"), "unload it first"),
        (lambda: llm.load_lora_adapter("b", small / "b"), "max_loras"),
        (lambda: llm.unload_lora_adapter("b"), "not loaded"),
        (lambda: llm.generate([[5]], lora_request=LoRARequest("b")), "not loaded"),
        (lambda: llm.generate([[5]], lora_request=[None, None]), "has 2 items for 1 prompts"),
        (lambda: LLM(small, **OPTIONS).load_lora_adapter("a", small / "a"), "enable_lora"),
        (lambda: LLM(small, lora_modules=("a",), **OPTIONS), "name=folder"),
    ):
        with pytest.raises(PenstockError, match=message):
            call()


# --- Over HTTP --------------------------------------------------------------------------------------------------------

CITY = [{"role": "user", "content": "What is the capital of Canada?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def demo_adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        adapter(demo.CHAT, folder / name, seed, r=4)
    return folder


@pytest.fixture(scope="module")
def server(demo_adapters: Path) -> Iterator[Served]:
    blocks = ("--num-gpu-blocks-override", "400", "--api-server-count", "2")
    with Served(*blocks, "--lora-modules", f"a={demo_adapters / 'a'}", "--allow-runtime-lora-updating") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def answers(client: openai.OpenAI, name: str) -> tuple[str, str]:
    """Return the text of a streamed chat and the text of a completion."""
    stream = client.chat.completions.create(model=name, messages=CITY, stream=True, **GREEDY)  # type: ignore[call-overload]
    text = ""
    for chunk in stream:
        assert chunk.model == name
        text += chunk.choices[0].delta.content or ""
    completion = client.completions.create(model=name, prompt="The capital of Canada", **GREEDY)
    assert completion.model == name
    return text, completion.choices[0].text


def expected(folder: Path | None) -> tuple[str, str]:
    """Return the texts that ``answers`` must return for the adapter in a folder (None: the base model)."""
    llm = LLM(enable_lora=True, num_gpu_blocks_override=400)
    chosen = LoRARequest("x", 1, str(folder)) if folder else None
    params = SamplingParams(**GREEDY)
    (chat,) = llm.chat(CITY, params, use_tqdm=False, lora_request=chosen)
    (text,) = llm.generate("The capital of Canada", params, use_tqdm=False, lora_request=chosen)
    return chat.outputs[0].text, text.outputs[0].text


def update(server: Served, action: str, **body: str) -> httpx.Response:
    return httpx.post(f"{server.url}/{action}_lora_adapter", json=body, timeout=60)


@pytest.mark.slow
def test_adapters_are_served_as_models(server: Served, client: openai.OpenAI, demo_adapters: Path) -> None:
    listed = {model.id: model.parent for model in client.models.list()}  # type: ignore[attr-defined]
    assert listed == {"penstock-demo": None, "a": "penstock-demo"}
    assert answers(client, "a") == expected(demo_adapters / "a")
    assert server.find(r"POST /v1/completions .* adapter=a ")
    assert answers(client, "penstock-demo") == expected(None) != answers(client, "a")
    path = str(demo_adapters / "b")
    loaded = update(server, "load", lora_name="b", lora_path=path)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'b' added successfully.")
    assert client.models.retrieve("b").parent == "penstock-demo"  # type: ignore[attr-defined]
    roots = {model.id: model.root for model in client.models.list()}  # type: ignore[attr-defined]
    assert roots == {"penstock-demo": "penstock-demo", "a": str(demo_adapters / "a"), "b": str(demo_adapters / "b")}
    assert answers(client, "b") == expected(demo_adapters / "b")
    again = update(server, "load", lora_name="b", lora_path=path)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert update(server, "unload", lora_name="b").status_code == 200
    assert update(server, "unload", lora_name="b").status_code == 404
    with pytest.raises(openai.NotFoundError):
        answers(client, "b")


def test_metrics_list_adapters_of_running_requests(server: Served, client: openai.OpenAI) -> None:
    """vLLM has the same metric; endpoint pickers use it to route requests to engines that run their adapter."""

    def lora_info() -> dict[str, str]:
        page = httpx.get(f"{server.root}/metrics").text
        (family,) = [each for each in text_string_to_metric_families(page) if each.name == "vllm:lora_requests_info"]
        (sample,) = family.samples
        return sample.labels

    assert lora_info()["max_lora"] == "16"
    ends: dict[str, Any] = {"max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="a", prompt="Once", **ends):
        deadline = time.monotonic() + 30
        while lora_info()["running_lora_adapters"] != "a":  # the engine reports metrics periodically
            assert time.monotonic() < deadline


@pytest.mark.row("paddlenlp", "model")
@pytest.mark.row("anthropic", "model")
@pytest.mark.row("responses", "model")
def test_adapters_are_models_in_other_dialects(server: Served, demo_adapters: Path) -> None:
    (chat, _), plain = expected(demo_adapters / "a"), expected(None)[0]
    for model, text in (("a", chat), ("default", plain)):
        body = {"model": model, "messages": CITY, "temperature": 0}
        paddlenlp_body = {"model": model, "text": CITY[0]["content"], "temperature": 0, "max_dec_len": 12}
        found = httpx.post(f"{server.url}/chat/completions", json=paddlenlp_body, timeout=60).json()
        assert found["result"] == text
        found = httpx.post(f"{server.url}/messages", json=body | {"max_tokens": 12}, timeout=60).json()
        assert found["content"][0]["text"] == text
        body = {"model": model, "input": CITY, "temperature": 0, "max_output_tokens": 12}
        found = httpx.post(f"{server.url}/responses", json=body, timeout=60).json()
        assert found["output"][0]["content"][0]["text"] == text
    for path, body in (("/messages", {"messages": CITY, "max_tokens": 1}), ("/responses", {"input": "x"})):
        assert httpx.post(server.url + path, json={"model": "nobody", **body}, timeout=60).status_code == 404


@pytest.mark.slow
def test_invalid_load_is_refused_over_http(
    server: Served, servers: Servers, demo_adapters: Path, tmp_path: Path
) -> None:
    wrong = update(server, "load", lora_name="c", lora_path=str(tmp_path))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_path")
    duplicate = update(server, "load", lora_name="penstock-demo", lora_path=str(demo_adapters / "b"))
    assert (duplicate.status_code, duplicate.json()["error"]["param"]) == (400, "lora_name")
    closed = servers.get("--num-gpu-blocks-override", "400")
    assert update(closed, "load", lora_name="b", lora_path=str(demo_adapters / "b")).status_code == 404


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("given", "message"),
    [("penstock-demo=/tmp", "is the name of a model"), ("a=/nowhere", "has no adapter_config.json")],
)
def test_invalid_adapter_fails_the_start_with_message(given: str, message: str) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--num-gpu-blocks-override", "40"]
    result = subprocess.run([*command, "--lora-modules", given], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_next_engine_has_adapters_loaded_before(server: Served, client: openai.OpenAI, demo_adapters: Path) -> None:
    """After the death of the engine, and after its replacement."""
    assert update(server, "load", lora_name="b", lora_path=str(demo_adapters / "b")).status_code == 200
    before = answers(client, "b")
    long = {"model": "b", "prompt": "The sea", "max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**long).choices[0].text
    os.kill(server.pids["engine"][0], signal.SIGKILL)
    assert answers(client, "b") == before

    stream = client.completions.create(**long, stream=True)
    parts = [next(stream).choices[0].text]
    asyncio.run(storm.replace_engines(server))
    parts += [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == text
    assert answers(client, "b") == before
    assert {model.id for model in client.models.list()} == {"penstock-demo", "a", "b"}
    assert update(server, "unload", lora_name="b").status_code == 200


# --- While serving ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stream_continues_after_unload_of_its_adapter(small: Path) -> None:
    """The stream continues even if another adapter is loaded under the same name."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = random_prompt(0, 20)
    chosen = {name: LoRARequest(name, 1, str(small / name)) for name in "ab"}
    alone = LLM(small, enable_lora=True, **OPTIONS).generate([prompt] * 2, params, lora_request=[*chosen.values()])
    expected = {name: output.outputs[0].token_ids for name, output in zip("ab", alone, strict=True)}

    async def talk() -> None:
        async with AsyncLLM(small, enable_lora=True, **OPTIONS) as llm:
            count = 0
            async for output in llm.generate(prompt, params, lora_request=chosen["a"]):
                count += 1
                if count == 3:
                    await llm.unload_lora_adapter("a")
                    with pytest.raises(PenstockError, match="not loaded"):
                        await llm.unload_lora_adapter("a")
                    await llm.load_lora_adapter("a", small / "b")
                    *_, other = [new async for new in llm.generate(prompt, params, lora_request=LoRARequest("a"))]
                    assert other.outputs[0].token_ids == expected["b"]
                last = output
            assert last.outputs[0].token_ids == expected["a"]
            plain, adapted = await asyncio.gather(llm.embed(prompt), llm.embed(prompt, lora_request=LoRARequest("a")))
            assert plain.outputs != adapted.outputs
            async for output in llm.generate(prompt, params, lora_request=LoRARequest("b")):
                assert output.outputs[0].failure is not None
                assert output.outputs[0].failure.code is Code.NOT_FOUND

    asyncio.run(talk())
