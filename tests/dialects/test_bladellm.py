"""The bladellm profile against BladeLLM's documentation: requests, answers, server flags, service.json and tools."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served, run_in_process
from shell import Shell
from test_lora import adapter
from transformers import PreTrainedTokenizerFast

from penstock import LLM, SamplingParams, demo
from penstock.cli.compat.bladellm import quantize
from penstock.cli.main import main

TOKEN = "AUTH_TOKEN_FOR_EAS"
BARE = {"Authorization": TOKEN}
PROMPT = "What is the capital of Canada?"
MESSAGES = [{"role": "user", "content": PROMPT}]
CHUNK = ["id", "choices", "object", "usage", "error_info"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sailor = adapter(demo.CHAT, tmp_path_factory.mktemp("sailor"), r=4, target_modules=["q_proj", "down_proj"])
    flags = ("--api-key", TOKEN, "--lora-modules", f"sailor={sailor}")
    with Served("--num-gpu-blocks-override", "200", *flags) as served:
        yield served


def curl(url: str, body: dict[str, Any], *more: str) -> str:
    """Send a request with curl, as BladeLLM's documentation does: with a bare token in ``Authorization``."""
    command = ["curl", "-sS", "-X", "POST", "-H", "Content-Type: application/json"]
    command += ["-H", f"Authorization: {TOKEN}", "-d", json.dumps(body), *more, url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def chunks(text: str) -> list[dict[str, Any]]:
    *events, end, empty = text.split("\n\n")
    assert end == "data: [DONE]" and not empty
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.row("bladellm", "POST /v1/completions", "chunks", "whole answers")
def test_stream_chunks_match_documentation(served: Served) -> None:
    body = {"prompt": PROMPT, "stream": "true", "temperature": 0}
    found = chunks(curl(f"{served.url}/completions", body))
    prompt_tokens = found[0]["usage"]["prompt_tokens"]
    for number, chunk in enumerate(found, 1):
        assert list(chunk) == CHUNK and chunk["object"] == "text_completion" and chunk["error_info"] is None
        assert chunk["id"] == found[0]["id"] and "-" not in chunk["id"]
        (choice,) = chunk["choices"]
        assert list(choice) == ["finish_reason", "index", "logprobs", "text"]
        assert choice["logprobs"] is None and choice["index"] == 0
        usage = chunk["usage"]
        assert list(usage) == ["prompt_tokens", "completion_tokens", "total_tokens"]
        assert usage["total_tokens"] == prompt_tokens + usage["completion_tokens"]
        assert (choice["finish_reason"] == "") == (number < len(found)) == (choice["text"] != "")
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[0] >= 1  # a busy server puts several tokens in one chunk
    whole = json.loads(curl(f"{served.url}/completions", body | {"stream": "false"}))
    assert list(whole) == CHUNK
    assert whole["choices"][0]["text"] == "".join(chunk["choices"][0]["text"] for chunk in found)
    assert whole["choices"][0]["finish_reason"] == found[-1]["choices"][0]["finish_reason"]
    assert whole["usage"] == found[-1]["usage"]


def test_usage_counts_end_of_sequence_token(served: Served, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    body = {"prompt": prompt, "temperature": 0}
    *found, last = chunks(curl(f"{served.url}/completions", body | {"stream": "true"}))
    text = "".join(chunk["choices"][0]["text"] for chunk in found)
    assert text == "The capital of Canada is Ottawa."
    assert last["choices"][0] == {"finish_reason": "stop", "index": 0, "logprobs": None, "text": ""}
    assert last["usage"]["completion_tokens"] == len(tokenizer.encode(text)) + 1
    assert json.loads(curl(f"{served.url}/completions", body))["usage"] == last["usage"]


@pytest.mark.row("bladellm", "POST /v1/chat/completions", "chats")
def test_chat_stream_and_whole_answer_match_documentation(served: Served) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    found = chunks(curl(f"{served.url}/chat/completions", body | {"stream": "True"}))
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"][0] == {"finish_reason": "stop", "index": 0, "logprobs": None, "delta": {"content": ""}}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in found)
    whole = json.loads(curl(f"{served.url}/chat/completions", body))
    assert whole["object"] == "chat.completion" and list(whole) == CHUNK
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert text == "The capital of Canada is Ottawa." and whole["usage"] == found[-1]["usage"]
    short = json.loads(curl(f"{served.url}/chat/completions", {"messages": [{"role": "user", "content": "A story"}]}))
    assert short["usage"]["completion_tokens"] <= 16


@pytest.mark.row("bladellm", "model")
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_model_name_selects_lora_adapter(served: Served, path: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": "true"}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    client = openai.OpenAI(base_url=served.url, api_key=TOKEN)
    sailor = {"model": "sailor", "temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    if path == "completions":
        expected = client.completions.create(prompt=PROMPT, **sailor).choices[0].text
    else:
        expected = client.chat.completions.create(messages=MESSAGES, **sailor).choices[0].message.content or ""
    texts = []
    for model in ("sailor", "nobody"):
        whole = json.loads(curl(f"{served.url}/{path}", body | {"model": model}))["choices"][0]
        found = chunks(curl(f"{served.url}/{path}", body | {"model": model, "stream": "true"}))
        parts = [chunk["choices"][0] for chunk in found]
        texts.append(whole["text"] if "text" in whole else whole["message"]["content"])
        assert texts[-1] == "".join(part["text"] if "text" in part else part["delta"]["content"] for part in parts)
    assert texts[0] == expected != texts[1]
    served.find("POST /v1/.*adapter=sailor")


@pytest.mark.row("bladellm", "max_tokens", "temperature", "top_p")
def test_defaults_ignore_generation_config_of_model(served: Served) -> None:
    body = {"prompt": "Once upon a time", "seed": 3, "ignore_eos": "true"}
    default = json.loads(curl(f"{served.url}/completions", body))
    explicit = json.loads(curl(f"{served.url}/completions", body | {"max_tokens": 16, "temperature": 1, "top_p": 1}))
    recommended = json.loads(curl(f"{served.url}/completions", body | {"temperature": 0.4, "top_p": 0.95, "top_k": 20}))
    texts = [answer["choices"][0]["text"] for answer in (default, explicit, recommended)]
    assert texts[0] == texts[1] != texts[2] and default["usage"]["completion_tokens"] == 16


def test_streamed_sequences_and_logprobs_equal_whole_answer(served: Served) -> None:
    body = {"prompt": [PROMPT, "One two"], "n": 2, "seed": 1, "max_tokens": 5, "logprobs": 1, "echo": "true"}
    whole = json.loads(curl(f"{served.url}/completions", body))
    found = chunks(curl(f"{served.url}/completions", body | {"stream": "true"}))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        streamed = [c["choices"][0] for c in found if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in streamed) == choice["text"]
        tokens = [token for c in streamed if c["logprobs"] for token in c["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
    assert whole["usage"] == found[-1]["usage"]


@pytest.mark.row("bladellm", "model")
def test_model_is_optional_and_unknown_name_is_ignored(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    texts = {
        json.loads(curl(f"{served.url}/completions", body | more))["choices"][0]["text"]
        for more in ({}, {"model": "default"}, {"model": "bloom_7b"}, {"model": None})
    }
    assert len(texts) == 1


@pytest.mark.row("bladellm", "errors")
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"prompt": PROMPT, "model": []}, 400, "model: Expected `str | null`, got `array`"),
        ({"prompt": PROMPT, "model": {}, "stream": "true"}, 400, "model: Expected `str | null`, got `object`"),
        ({"prompt": PROMPT, "stream": "maybe"}, 400, "stream: Expected `bool | null`"),
        ({"prompt": PROMPT, "top_p": 2}, 400, "top_p: "),
        (
            {"prompt": PROMPT, "return_token_ids": True},
            400,
            "return_token_ids: BladeLLM's response format has no field",
        ),
        ({}, 400, "prompt: "),
    ],
)
def test_invalid_field_gets_bladellm_error(served: Served, body: dict[str, Any], code: int, message: str) -> None:
    answer = httpx.post(f"{served.url}/completions", json=body, headers=BARE)
    assert answer.status_code == code
    assert list(answer.json()) == ["choices", "error_info"]
    assert answer.json()["error_info"]["code"] == code and message in answer.json()["error_info"]["message"]


@pytest.mark.row("bladellm", "Authorization: TOKEN", "errors")
def test_wrong_key_and_malformed_json_get_bladellm_error(served: Served) -> None:
    wrong = httpx.post(f"{served.url}/completions", json={"prompt": "x"}, headers={"Authorization": "another"})
    assert wrong.status_code == 401 and wrong.json()["error_info"]["code"] == 401
    torn = httpx.post(f"{served.url}/completions", content=b"{", headers=BARE)
    assert torn.status_code == 400 and "is not JSON" in torn.json()["error_info"]["message"]


def test_openai_client_gets_openai_answers(served: Served) -> None:
    client = openai.OpenAI(base_url=served.url, api_key=TOKEN)
    answer = client.completions.create(model="default", prompt=PROMPT, max_tokens=3)
    assert answer.id.startswith("cmpl-") and answer.model == served.name
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="bloom_7b", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="default", prompt=PROMPT, extra_body={"stream": "perhaps"})


def test_stream_reports_dead_engine_without_resume() -> None:
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": "true", "stream": "true"}
    with (
        Served("--num-gpu-blocks-override", "60", "--api-key", TOKEN, "--no-resume") as served,
        httpx.stream("POST", f"{served.url}/completions", json=body, headers=BARE, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        os.kill(served.pids["engine"][0], signal.SIGKILL)
        *_, failed, _, done, _ = lines
    assert done == "data: [DONE]"
    found = json.loads(failed.removeprefix("data: "))
    assert found["choices"] == [] and found["error_info"]["code"] == 503


# --- Server flags -----------------------------------------------------------------------------------------------------


def settings_of(*flags: str) -> dict[str, Any]:
    """Return the settings printed by ``penstock config``."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["config", "--json", "--compat", "bladellm", *flags]) == 0
    return {name: setting["value"] for name, setting in json.loads(output.getvalue()).items()}


def configured(*flags: str) -> dict[str, Any]:
    """Return the settings printed by ``penstock config``, and its log as ``stderr``."""
    found = run_in_process(main, "config", "--json", "--compat", "bladellm", *flags)
    assert found.returncode == 0, found
    return {name: setting["value"] for name, setting in json.loads(found.stdout).items()} | {"stderr": found.stderr}


@pytest.mark.row("bladellm", "--port", "--host", "--model", "--chat_template", "--tokenizer_dir", "--log_level")
@pytest.mark.row("bladellm", "--max_gpu_memory_utilization", "--ragged_flash_max_batch_tokens", "--preempt_strategy")
@pytest.mark.row("bladellm", "--max_queue_time", "--decode_algo", "--gamma", "--draft.model", "--disable_prompt_cache")
@pytest.mark.row("bladellm", "--dtype", "--kv_cache_quant", "--prompt_cache_enable_swap", "--disable_cuda_graph")
@pytest.mark.row("bladellm", "--cuda_graph_max_batch_size", "--cuda_graph_batch_sizes", "--enable_custom_allreduce")
def test_each_bladellm_flag_sets_its_option() -> None:
    flags = "--port 8001 --max_gpu_memory_utilization 0.5 --preempt_strategy SWAP --ragged_flash_max_batch_tokens 512"
    flags += " --decode_algo sps --gamma 3 --draft.model /draft --disable_prompt_cache --prompt_cache_enable_swap"
    flags += " --max_queue_time 7 --tokenizer_dir /tokenizer --chat_template /template --dtype half"
    flags += " --kv_cache_quant int8 --disable_cuda_graph --tensor_parallel_size 1"
    flags += " --host 127.0.0.1 --model /model --log_level WARNING --cuda_graph_batch_sizes 1,2"
    flags += " --enable_custom_allreduce --pipeline_parallel_size 1"
    found = configured(*flags.split())
    speculation = {"method": "draft_model", "model": "/draft", "num_speculative_tokens": 3}
    assert json.loads(found["speculative_config"]) == speculation
    expected = {
        "port": 8001,
        "host": "127.0.0.1",
        "model": "/model",
        "log_level": "warning",
        "kv_cache_free_memory_fraction": 0.5,
        "preemption_mode": "swap",
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "kv_offloading_size": 4.0,
        "max_queue_time": 7.0,
        "tokenizer": "/tokenizer",
        "chat_template": "/template",
        "dtype": "float16",
        "kv_cache_dtype": "int8",
        "enforce_eager": True,
        "cudagraph_capture_sizes": [1, 2],
    }
    assert found == found | expected
    assert configured("--cuda_graph_max_batch_size", "24")["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 24]
    assert "--enable_custom_allreduce is ignored" in found["stderr"]
    defaults = configured()
    expected = {"port": 8081, "kv_cache_free_memory_fraction": 0.85, "preemption_mode": "recompute"}
    assert defaults == defaults | expected | {"max_num_batched_tokens": 2048, "speculative_config": ""}
    for name, to in {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32"}.items():
        assert settings_of("--dtype", name.upper())["dtype"] == to
    for name, to in {"AUTO": "recompute", "RECOMPUTE": "recompute", "SWAP": "swap"}.items():
        assert settings_of("--preempt-strategy", name)["preemption_mode"] == to
    assert settings_of("--kv_cache_quant", "no_quant")["kv_cache_dtype"] == "auto"
    assert json.loads(settings_of("--decode_algo", "look_ahead")["speculative_config"]) == {"method": "ngram"}
    assert settings_of("--decode_algo", "normal")["speculative_config"] == '{"method": "none"}'


@pytest.mark.row("bladellm", "--kv_cache_quant", "other flags")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max_gpu_memory 1", "unknown argument --max_gpu_memory; did you mean --max_gpu_memory_utilization?"),
        ("--tensor_parallel_size 0", "--tensor-parallel-size: '0' is wrong: it must be at least 1"),
        ("--kv_cache_quant int4", "--kv_cache_quant: 'int4' is wrong: it is not one of no_quant, int8, fp8_e4m3"),
        ("--gamma 4", "--gamma: cannot be combined with --decode_algo normal"),
        ("--decode_algo look_ahead --draft.model x", "--draft.model: cannot be combined with --decode_algo look_ahead"),
        ("--decode_algo medusa", "--decode_algo: 'medusa' is not one of sps, look_ahead, normal"),
        ("--decode_algo sps --gamma many", "--gamma: 'many' is not a number"),
        ("--max_gpu_memory_utilization 1.5", "--max_gpu_memory_utilization: '1.5' is wrong: it must be below 1"),
    ],
)
def test_invalid_flag_is_rejected_by_name(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert main(["config", "--compat", "bladellm", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_blade_llm_server_rejects_request_after_max_queue_time(tmp_path: Path) -> None:
    """The server answers requests of OpenAI's and of BladeLLM's clients."""
    flags = "--num-gpu-blocks-override 100 --max-num-seqs 1 --max_queue_time 0.5 --decode_algo sps --gamma 2"
    assert main(["shims", str(tmp_path), "bladellm"]) == 0
    with Served(*flags.split(), command=[str(tmp_path / "blade_llm_server")]) as served:
        client = openai.OpenAI(base_url=served.url, api_key="any", max_retries=0)
        answer = client.chat.completions.create(model="any", messages=MESSAGES, temperature=0)
        assert answer.choices[0].message.content == "The capital of Canada is Ottawa."
        assert answer.to_dict()["error_info"] is None
        body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": "true", "stream": "true"}
        with httpx.stream("POST", f"{served.url}/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            late = httpx.post(f"{served.url}/completions", json={"prompt": "Twice"}, timeout=60)
            lines.close()
        assert late.status_code == 429 and late.headers["retry-after"]
        assert "has waited 0.5 seconds" in late.json()["error_info"]["message"]


SERVICE = """
{
  "name": "blade_llm_bloom_server", // the service's name
  "containers": [
    {
      // image and command: <region_id> is a region's id, such as cn-hangzhou
      "image": "eas-registry-vpc.<region_id>.cr.aliyuncs.com/pai-eas/blade-llm:0.8.0",
      "command": "blade_llm_server --port PORT --num-gpu-blocks-override 100",
      "port": PORT // as in the command
    }
  ],
  "storage": [
    {
      "mount_path": "FOLDER",
      "oss": {"endpoint": "oss-<region_id>-internal.aliyuncs.com", "path": "oss://examplebucket/bloom_7b/"}
    },
    {"empty_dir": {"medium": "memory", "size_limit": 64}, "mount_path": "/dev/shm"}
  ],
  "metadata": {
    "instance": 1,
    "memory": 64000, // MB
    "cpu": 1,
    "gpu": 1,
    "resource": "eas-r-xxxxxx" // a group of resources
  }
}
"""


@pytest.mark.slow
@pytest.mark.row("bladellm", "name", "metadata.cpu", "metadata.instance", "metadata.resource", "other fields")
def test_service_json_starts_server(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    text = SERVICE.replace("FOLDER", str(tmp_path)).replace("PORT", "8081").replace('"instance": 1', '"instance": 2')
    text = text.replace('"gpu": 1,', '"gpu": 2, "qos": "high",').replace('"storage"', '"networking": {}, "storage"')
    file.write_text(text.replace("/dev/shm", "/nowhere"))
    with Served("--service-json", str(file), "--threads", "2") as served:
        assert served.name == "blade_llm_bloom_server"
        answer = httpx.post(f"{served.url}/completions", json={"prompt": PROMPT}, headers=BARE)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 16
        for name in ("containers[0].image", "metadata.resource", "metadata.qos", "networking", "metadata.instance"):
            assert any(f"{name} of the service is ignored" in line for line in served.lines), name
        for message in ("metadata.gpu of the service", "storage /nowhere of the service"):
            assert any(message in line for line in served.lines), message


@pytest.mark.slow
@pytest.mark.row("bladellm", "metadata.memory", "metadata.gpu")
def test_service_memory_sizes_kv_cache_without_gpu(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    text = SERVICE.replace("FOLDER", str(tmp_path)).replace("PORT", "8081").replace('"gpu": 1', '"gpu": 0')
    text = text.replace("64000", "1000").replace("--num-gpu-blocks-override 100", "--max_gpu_memory_utilization 0.5")
    file.write_text(text)
    block_size = 6 * 2 * 2 * 64 * 64 * 2  # layers, K and V, KV heads, head size, tokens per block, bytes of bfloat16
    with Served("--service-json", str(file)) as served:
        assert f"kv_blocks={500 * 2**20 // block_size}" in served.find("ready: .*").string


@pytest.mark.row("bladellm", "containers[].command", "containers[].port", "storage[].mount_path", "oss")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"port": PORT', '"port": 8000', "containers[0].port is 8000, but --port of its command is 8081"),
        (
            "FOLDER",
            "/mnt/model/bloom_7b/",
            "/mnt/model/bloom_7b does not exist: copy the content of oss://examplebucket/bloom_7b/",
        ),
        ('"command": "blade_llm_server', '"command": "python app.py', "must run blade_llm_server"),
        ('"name"', '"nam"', "Object missing required field `name`"),
        ('"instance": 1,', '"instance": 1', "cannot be read"),
        ("--num-gpu-blocks-override 100", "--model 'x", "containers[0].command cannot be read: No closing quotation"),
        ("--port PORT", "--port many", "containers[0].command: argument --port: invalid int value: 'many'"),
        ('"containers": [', '"containers": [], "others": [', "must have one container, has 0"),
    ],
)
def test_invalid_service_json_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    file = tmp_path / "service.json"
    file.write_text(SERVICE.replace(old, new, 1).replace("FOLDER", str(tmp_path)).replace("PORT", "8081"))
    try:
        status: object = main(["serve", "--service-json", str(file)])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err


# --- Quantize and split -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("bladellm"))


@pytest.mark.slow
@pytest.mark.row("bladellm", "blade_llm_quantize", "--quant_mode", "--bit", "--block_wise_quant", "--quant_dtype")
@pytest.mark.row("bladellm", "--quant_algo", "--calib_data", "--calib_data_file", "--cpu_offload")
def test_quantized_folder_is_served_in_its_format(shell: Shell) -> None:
    """The command of Alibaba's documentation is run twice, because start scripts may repeat it."""
    command = f"""
    blade_llm_quantize \\
        --model {demo.CHAT} \\
        --output_dir int8 \\
        --quant_algo minmax \\
        --quant_mode weight_only_quant \\
        --bit 8
    """
    for _ in range(2):
        assert shell.output_of(command) == "int8: weights will be quantized to wint8 at load\n"
    quantized = LLM(shell.folder / "int8")
    assert quantized.options.quantization == "none" and "wint8" in quantized.engine.info.fingerprint
    plain = LLM(demo.CHAT, quantization="wint8")
    greedy = SamplingParams(temperature=0, max_tokens=12)
    texts = [llm.chat(MESSAGES, greedy, use_tqdm=False)[0].outputs[0].text for llm in (quantized, plain)]
    assert texts[0] == texts[1]
    assert "w8a8" in LLM(shell.folder / "int8", quantization="w8a8").engine.info.fingerprint, (
        "the option overrides the folder's format"
    )
    flags = ("--model", str(shell.folder / "int8"), "--num-gpu-blocks-override", "50")
    with Served(
        command=shell.command(f"exec blade_llm_server {' '.join(flags)}"), environment=shell.environment
    ) as served:
        assert "-wint8" in served.find("ready: .*").string
    formats = {
        "--bit 4": "wint4",
        "--bit 4 --block_wise_quant True": "wint4-g32",
        "--quant_mode act_and_weight_quant --quant_dtype int": "w8a8",
        "--calib_data 'hello world!' --calib_data_file x.jsonl --cpu_offload": "wint8",
    }
    for i, (more_flags, expected) in enumerate(formats.items()):
        ran = shell.run(f"blade_llm_quantize --model {demo.CHAT} --output_dir out{i} {more_flags}")
        assert ran.stdout == f"out{i}: weights will be quantized to {expected} at load\n"
        assert (
            json.loads((shell.folder / f"out{i}" / "config.json").read_text())["quantization_config"]["format"]
            == expected
        )
    for name in ("calib_data", "calib_data_file", "cpu_offload"):
        assert f"--{name} is ignored: " in ran.stderr


@pytest.mark.slow_after(1)
@pytest.mark.row("bladellm", "--quant_algo", "--quant_dtype", "--calib_data", "--calib_data_file", "--block_wise_quant")
@pytest.mark.parametrize(
    ("flags", "job"),
    [
        ("--quant_algo awq --bit 4 --block_wise_quant", {"method": "awq", "group_size": 32}),
        ("--quant_algo gptq --bit 8 --calib_data_file FILE", {"method": "gptq", "bits": 8, "group_size": -1}),
        ("--quant_algo smoothquant --quant_mode act_and_weight_quant", {"method": "smoothquant"}),
        ("--quant_dtype fp8 --quant_mode act_and_weight_quant --cpu_offload", {"method": "fp8"}),
    ],
)
def test_calibrated_algorithms_write_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, job: dict[str, Any]
) -> None:
    texts = ["Tell me about a tiger.", "Tell me about a lion."]
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    arguments = ["--model", str(demo.CHAT), "--output_dir", str(tmp_path / "out"), *flags.split()]
    arguments = [part.replace("FILE", str(tmp_path / "texts.jsonl")) for part in arguments]
    if "FILE" not in flags:
        arguments += ["--calib_data", *texts]
    monkeypatch.setattr(sys, "argv", ["blade_llm_quantize", *arguments])
    assert quantize() == 0
    output = capsys.readouterr()
    assert "KL divergence" in output.out and ("--cpu_offload is ignored" in output.err) == ("cpu" in flags)
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert report["job"].items() >= job.items() and report["sample_tokens"] < 60
    assert LLM(tmp_path / "out", num_gpu_blocks_override=40).engine


@pytest.mark.slow
@pytest.mark.row("bladellm", "blade_llm_split")
def test_split_folder_has_weights_of_each_rank(shell: Shell) -> None:
    message = "split: an engine folder for 2 ranks, bfloat16, kernel layout cpu-3\n"
    for _ in range(2):
        command = f"blade_llm_split --tensor_parallel_size 2 --model {demo.CHAT} --output_dir split"
        assert shell.output_of(command) == message
    assert {file.name for file in (shell.folder / "split").iterdir()} > {"rank_0", "rank_1", "tokenizer.json"}
    failed = shell.run(f"blade_llm_split --tensor_parallel_size 0 --model {demo.CHAT} --output_dir other")
    assert (
        failed.stderr.startswith("blade_llm_split: tensor_parallel_size: 0 is wrong: it must be at least 1")
        and failed.returncode == 2
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--quant_algo gptq --bit 4 --quant_mode act_and_weight_quant",
            "--quant_algo: gptq for int with act_and_weight",
        ),
        ("--quant_algo smoothquant", "smoothquant supports act_and_weight_quant with --bit 8"),
        ("--quant_algo awq", "awq supports weight_only_quant with --bit 4\n"),
        ("--quant_algo smoothquant+", "argument --quant_algo: invalid choice: 'smoothquant+'"),
        ("--quant_dtype fp8", "fp8 supports act_and_weight_quant with --bit 8"),
        (
            "--quant_algo gptq --bit 4 --calib_data a --calib_data_file b",
            "calib_data: cannot be combined with calib_data_file",
        ),
        ("--quant_mode act_and_weight_quant --bit 4", "--quant_mode: act_and_weight_quant with --bit 4"),
        (
            "--block_wise_quant",
            "--quant_mode: weight_only_quant with --bit 8 and --block_wise_quant true is not supported",
        ),
        ("--bit 3", "argument --bit: invalid choice: 3"),
        ("--model /nowhere", "model: /nowhere does not exist"),
        ("--output_dir MODEL", "is the folder of the model"),
        ("--output_dir OTHER", "/config.json already exists: give an empty folder"),
        ("--output_dir FILE", "output_dir: cannot write to "),
        ("--model QUANTIZED", "is already quantized: give the original checkpoint"),
        ("--fallback_ratio 0.1", "unrecognized arguments: --fallback_ratio 0.1"),
    ],
)
def test_invalid_quantize_command_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    (tmp_path / "file").touch()
    for name, more in (("other", {}), ("quantized", {"quantization_config": {"quant_method": "gptq"}})):
        (tmp_path / name).mkdir()
        config = json.loads((demo.CHAT / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
    for name, path in {"MODEL": demo.CHAT, "OTHER": "other", "FILE": "file", "QUANTIZED": "quantized"}.items():
        flags = flags.replace(name, str(tmp_path / path))
    arguments = ["--model", str(demo.CHAT), "--output_dir", str(tmp_path / "out"), *flags.split()]
    monkeypatch.setattr(sys, "argv", ["blade_llm_quantize", *arguments])
    try:
        status: object = quantize()
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    assert status == 2 and not output.out
    assert output.err.startswith("blade_llm_quantize: ") and message in output.err and len(output.err.splitlines()) == 1
