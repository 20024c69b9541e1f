"""PaddleNLP's commands ``start_server``, ``stop_server`` and ``download_model.py``, and its environment variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import tritonclient.grpc as triton
from serving import free_ports
from test_hub import NEW, Hub
from test_paddlenlp_grpc import stream_chunks
from transformers import PreTrainedTokenizerFast

from penstock import LLM, PenstockError, demo
from penstock.cli.main import main
from penstock.config.profiles import load
from penstock.config.sources import read

PORTS = ("HEALTH_HTTP_PORT", "SERVICE_GRPC_PORT", "METRICS_HTTP_PORT", "SERVICE_HTTP_PORT")
PORT_VARIABLES = dict(zip(PORTS, ("8110", "8811", "8722", "9965"), strict=True))


def free_port_variables() -> dict[str, str]:
    """Return the environment variables of all ports, set to free ports."""
    return dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))


class Shell:
    """Runs PaddleNLP's commands in a folder, with separate ports and a separate runtime directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_port_variables()
        self.environment = {**os.environ, **self.ports, "XDG_RUNTIME_DIR": str(folder), "BLOCK_BS": "5"}

    def run(self, command: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run a command; return (exit status, standard output and error)."""
        ran = subprocess.run(
            [sys.executable, "-m", "penstock.cli.compat.paddlenlp", command, *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return ran.returncode, ran.stdout + ran.stderr

    def url(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    def ask(self, **body: Any) -> list[dict[str, Any]]:
        answer = requests.post(self.url("SERVICE_HTTP_PORT", "/v1/chat/completions"), json=body, timeout=60)
        return [json.loads(line) for line in answer.iter_lines()]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.run("stop_server", "10")


# --- Processes --------------------------------------------------------------------------------------------------------


@pytest.mark.row(
    "paddlenlp",
    "start_server [model_name]",
    "stop_server [seconds]",
    "HEALTH_HTTP_PORT",
    "METRICS_HTTP_PORT",
    "SERVICE_HTTP_PORT",
    "MODEL_DIR",
    "MAX_SEQ_LEN",
    "BLOCK_BS",
    "USE_WARMUP",
    "DISABLE_STREAMING",
    "USE_HF_TOKENIZER",
)
def test_server_starts_answers_and_stops(shell: Shell, tokenizer: PreTrainedTokenizerFast) -> None:
    switches = {"USE_WARMUP": "1", "DISABLE_STREAMING": "1", "USE_HF_TOKENIZER": "1"}
    status, output = shell.run("start_server", MODEL_DIR=str(demo.CHAT), MAX_SEQ_LEN="20", **switches)
    assert status == 0 and "Ready: process" in output, output
    log = (shell.folder / "log" / "server.log").read_text()
    assert "160 KV blocks" in log  # BLOCK_BS (5) x 2048 tokens, in blocks of 64 tokens
    assert "warmed up with" in log
    for port in ("HEALTH_HTTP_PORT", "SERVICE_HTTP_PORT"):
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert requests.get(shell.url(port, path), timeout=60).status_code == 200
    assert requests.post(shell.url("HEALTH_HTTP_PORT", "/v1/completions"), json={}, timeout=60).status_code == 404
    (at_once,) = shell.ask(text="Hello, how are you?", max_dec_len=8, stream=True)
    assert at_once["is_end"] == 1 and at_once["token"]
    with triton.InferenceServerClient(f"127.0.0.1:{shell.ports['SERVICE_GRPC_PORT']}") as grpc:
        (chunk,) = stream_chunks(grpc, json.dumps([{"text": "Hello, how are you?", "max_dec_len": 8}]).encode())
    assert chunk["is_end"] == 1 and chunk["token"]
    (answer,) = shell.ask(text="Hello", max_dec_len=4, temperature=0, return_usage=True)
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode("Hello"))
    messages = [{"role": "user", "content": "Hello"}]
    (whole,) = shell.ask(messages=messages, max_tokens=4)  # the profile selects PaddleNLP's dialect
    assert whole["result"] == whole["tokens_all"]
    client = openai.OpenAI(base_url=shell.url("SERVICE_HTTP_PORT", "/v1"), api_key="none")
    chunks = list(client.chat.completions.create(model="default", messages=messages, max_tokens=8, stream=True))
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) == 1
    found: dict[str, float] = {}
    while found.get("block_num") != 160:  # the engine reports metrics asynchronously
        page = requests.get(shell.url("METRICS_HTTP_PORT", "/metrics"), timeout=60).text
        labels_and_values = re.findall(
            r'^inference_server_metrics\{(\w+)="\1",model_name=".+"\} (\S+)$', page, re.MULTILINE
        )
        found = {label: float(value) for label, value in labels_and_values}
    blocks = {"block_num": 160, "max_block_num": 160, "available_resource": 1}
    assert found == {"batch_size": 0, "max_batch_size": 50, **blocks}
    (refused,) = shell.ask(text="a " * 40)
    assert "more than MAX_SEQ_LEN (20)" in refused["error_msg"]

    for model in ((), ("org/never-fetched",)):  # the port is checked before the model is downloaded
        status, output = shell.run("start_server", *model, MODEL_DIR=str(demo.CHAT))
        assert status == 2 and "SERVICE_HTTP_PORT" in output and "set another port" in output
    status, output = shell.run("stop_server")
    assert (status, output.startswith("Stopped process")) == (0, True)
    with pytest.raises(requests.ConnectionError):
        requests.get(shell.url("HEALTH_HTTP_PORT", "/v2/health/live"), timeout=60)
    assert shell.run("stop_server") == (0, "No server started by start_server is running.\n")


@pytest.mark.row("paddlenlp", "rank_0/model.pdiparams", "OUTPUT_LOG_TO_CONSOLE", "BATCH_SIZE")
def test_failed_start_is_explained(shell: Shell) -> None:
    (shell.folder / "graph" / "rank_0").mkdir(parents=True)
    (shell.folder / "graph" / "rank_0" / "model.pdiparams").touch()
    status, output = shell.run("start_server", MODEL_DIR="graph", OUTPUT_LOG_TO_CONSOLE="1")
    assert status == 2 and "graph/rank_0/model.pdiparams is a static graph, which only Paddle runs" in output
    assert "static graph" in (shell.folder / "log" / "console.log").read_text()
    status, output = shell.run("start_server", MODEL_DIR=str(demo.CHAT), BLOCK_BS="1e7")
    assert status == 2 and "BLOCK_BS: 1e+07 sequences of 2048 tokens take" in output and "at most" in output
    assert shell.run("start_server", BATCH_SIZE="129") == (
        2,
        "start_server: BATCH_SIZE: '129' is wrong: it must be from 1 to 128\n",
    )
    assert shell.run("stop_server")[1].startswith("No server")


@pytest.mark.row(
    "paddlenlp", "model_name", "org/name/weight_only_int8", "--speculate_model_path", "-s", "-m", "-d", "-n", "-M"
)
def test_model_name_downloads_model_and_sets_format(shell: Shell) -> None:
    hub = Hub()
    hub.files[NEW] = {path.name: path.read_bytes() for path in demo.CHAT.iterdir() if path.is_file()}
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(shell.folder / "hf"), "NO_PROXY": "127.0.0.1"}
    try:
        name = "org/chat/weight_only_int8"
        status, output = shell.run("start_server", name, MODEL_DIR=str(shell.folder), **environment)
        assert status == 0, output
        assert (shell.folder / name / "model.safetensors").exists()
        assert "wint8" in (shell.folder / "log" / "server.log").read_text()
        assert shell.ask(text="Hello", max_dec_len=2)[0]["error_code"] == 0
        short = ("-m", name, "-d", "here", "-n", "1", "-M", "master", "-s", "heads")
        status, output = shell.run("download_model.py", *short, **environment)
        assert status == 0 and (shell.folder / "here" / name / "config.json").exists(), output
        assert "--speculate_model_path is ignored: MTP layers are part of" in output
        for arguments, message in (
            (("-m", "org/chat-2nodes", "-n", "3"), "--nnodes: is 3, but org/chat-2nodes is for 2 nodes"),
            (("--mode", "slave"), "--mode: slave is for several nodes, but --nnodes is 1"),
            (("--model_name", "org/chat/a8w8_fp8"), "the format a8w8_fp8 is not supported"),
            (("--model_name", "org/unknown"), "has no public model org/unknown"),
        ):
            status, output = shell.run("download_model.py", *arguments, **environment)
            assert status == 2 and message in output, output
    finally:
        hub.stop()


def test_warmup_frees_all_kv_blocks_after_preemption() -> None:
    """The KV cache cannot hold all sequences of the warm-up, so some are preempted."""
    llm = LLM(use_warmup=True, num_gpu_blocks_override=33, max_num_seqs=40)
    assert llm.engine.scheduler.device_pool.num_free == llm.engine.scheduler.device_pool.total


# --- The environment --------------------------------------------------------------------------------------------------


def test_defaults_equal_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--compat", "paddlenlp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    of_profile = {
        "port": 9965, "health_port": 8110, "grpc_port": 8811, "metrics_port": 8722, "model": "/models/",
        "max_prompt_len": 8192, "max_output_len": 1024, "max_num_seqs": 50, "max_waiting": 128,
        "kv_cache_sequences": 50, "kv_cache_ratio": 0.75,
    }  # fmt: skip
    for name, value in of_profile.items():
        assert (found[name]["value"], found[name]["source"]) == (value, "the profile paddlenlp"), name
    of_penstock = {"api_server_count": 1, "use_warmup": False, "disable_streaming": False, "kv_cache_dtype": "auto"}
    for name, value in of_penstock.items():
        assert (found[name]["value"], found[name]["source"]) == (value, "default"), name


VARIABLES: dict[str, tuple[str, str, Any]] = {
    "HEALTH_HTTP_PORT": ("18110", "health_port", 18110),
    "METRICS_HTTP_PORT": ("18722", "metrics_port", 18722),
    "SERVICE_GRPC_PORT": ("18811", "grpc_port", 18811),
    "SERVICE_HTTP_PORT": ("-1", "port", -1),
    "MODEL_DIR": ("/m", "model", "/m"),
    "MAX_SEQ_LEN": ("100", "max_prompt_len", 100),
    "MAX_DEC_LEN": ("10", "max_output_len", 10),
    "BATCH_SIZE": ("128", "max_num_seqs", 128),
    "BLOCK_BS": ("5", "kv_cache_sequences", 5.0),
    "BLOCK_RATIO": ("0.5", "kv_cache_ratio", 0.5),
    "MAX_CACHED_TASK_NUM": ("1", "max_waiting", 1),
    "PUSH_MODE_HTTP_WORKERS": ("8", "api_server_count", 8),
    "DISABLE_STREAMING": ("1", "disable_streaming", True),
    "USE_WARMUP": ("1", "use_warmup", True),
    "USE_CACHE_KV_INT8": ("1", "kv_cache_dtype", "int8"),
}
"""By environment variable: a value, the setting it changes, and the setting's new value."""


@pytest.mark.row("paddlenlp", "MAX_DEC_LEN", "BLOCK_RATIO", "MAX_CACHED_TASK_NUM", "PUSH_MODE_HTTP_WORKERS")
@pytest.mark.row("paddlenlp", "USE_CACHE_KV_INT8", "SERVICE_GRPC_PORT")
@pytest.mark.parametrize("name", VARIABLES)
def test_environment_variable_sets_its_option(name: str) -> None:
    text, setting, value = VARIABLES[name]
    found = read({}, None, PORT_VARIABLES | {name: text}, load("paddlenlp"))
    parts = (found.configuration.engine, found.configuration.server)
    assert next(getattr(part, setting) for part in parts if hasattr(part, setting)) == value
    assert found.sources[setting] == name


@pytest.mark.row("paddlenlp", "tag")
@pytest.mark.parametrize(("name", "value"), [("tag", "3.0.0")])
def test_ignored_variable_is_reported(
    name: str, value: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    for variable, text in {**PORT_VARIABLES, name: value}.items():
        monkeypatch.setenv(variable, text)
    assert main(["config", "--compat", "paddlenlp"]) == 0
    assert f"{name} is ignored" in caplog.text
    assert f"{name} " in capsys.readouterr().out


@pytest.mark.row("paddlenlp", "HTTP_PORT", "METRICS_PORT", "GRPC_PORT", "INTER_QUEUE_PORT", "PUSH_MODE_HTTP_PORT")
def test_variable_names_before_version_3_are_accepted() -> None:
    old = {"HTTP_PORT": "1", "GRPC_PORT": "2", "METRICS_PORT": "3", "INTER_QUEUE_PORT": "4", "PUSH_MODE_HTTP_PORT": "5"}
    server = read({}, None, old, load("paddlenlp")).configuration.server
    assert (server.health_port, server.metrics_port, server.port) == (1, 3, 5)
    assert server == read({}, None, old | {"HEALTH_HTTP_PORT": "1"}, load("paddlenlp")).configuration.server


@pytest.mark.row("paddlenlp", "SERVICE_GRPC_PORT", "CUDA_VISIBLE_DEVICES", "POD_IPS", "POD_0_IP")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GRPC_PORT": "1"}, "SERVICE_GRPC_PORT: is 8811, but GRPC_PORT"),
        ({"HEALTH_HTTP_PORT": "99999"}, "HEALTH_HTTP_PORT: '99999' is wrong: it must be a port"),
        ({"SERVICE_GRPC_PORT": "x"}, "SERVICE_GRPC_PORT: 'x' is wrong"),
        ({"SERVICE_HTTP_PORT": "-2"}, "SERVICE_HTTP_PORT: '-2' is wrong: it must be a port"),
        ({"POD_0_IP": "10.0.0.3", "POD_IPS": "10.0.0.1"}, r"POD_0_IP: 10.0.0.3 is not among POD_IPS \(10.0.0.1\)"),
        ({"POD_0_IP": "10.0.0.3"}, "POD_0_IP: 10.0.0.3 is not among POD_IPS"),
        ({"MP_NNODE": "2", "MP_NUM": "16"}, "POD_IPS: must be set to the addresses of all nodes, as MP_NNODE is 2"),
        ({"MP_NNODE": "2", "POD_IPS": "a,b"}, "POD_0_IP: must be set to the address of node 0, as MP_NNODE is 2"),
        ({"POD_IPS": "a,b", "POD_0_IP": "a"}, "POD_IPS: has 2 addresses, but MP_NNODE is 1"),
        ({"MP_NUM": "2", "CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES: has 1 devices, but MP_NUM=2"),
        ({"MP_NUM": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES: has 2 devices, but MP_NUM=1"),
        ({"MP_NUM": "3", "MP_NNODE": "2", "POD_IPS": "a,b", "POD_0_IP": "a"}, "MP_NUM: 3 is not a multiple"),
        ({"MP_NUM": "0"}, "MP_NUM: '0' is not a positive integer"),
        ({"BATCH_SIZE": "129"}, "BATCH_SIZE: '129' is wrong: it must be from 1 to 128"),
        ({"PUSH_MODE_HTTP_WORKERS": "9"}, "PUSH_MODE_HTTP_WORKERS: '9' is wrong: it must be from 1 to 8"),
        ({"BLOCK_BS": "many"}, "BLOCK_BS: 'many' is wrong"),
        ({"BLOCK_RATIO": "1.5"}, "BLOCK_RATIO: 1.5 is wrong: it must be at most 1"),
        ({"USE_WARMUP": "yes"}, "USE_WARMUP: 'yes' is wrong: it must be 0 or 1"),
        ({"model_name": "chat"}, "model_name: 'chat' is wrong: it must be org/model"),
    ],
)
def test_invalid_variable_is_rejected_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        read({}, None, PORT_VARIABLES | variables, load("paddlenlp"))


@pytest.mark.row("paddlenlp", "MP_NNODE", "INTER_PROC_PORT")
@pytest.mark.parametrize(("first", "rank"), [("127.0.0.1", 0), ("198.51.100.1", 1)])
def test_pod_ips_set_node_rank(first: str, rank: int) -> None:
    variables = {"MP_NUM": "16", "MP_NNODE": "2", "POD_IPS": "127.0.0.1,198.51.100.1", "POD_0_IP": first}
    found = read(
        {}, None, PORT_VARIABLES | variables | {"INTER_PROC_PORT": "8813"}, load("paddlenlp")
    ).configuration.engine
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (2, rank, first, 8813)
    assert found.tensor_parallel_size == 16


@pytest.mark.row("paddlenlp", "MP_NUM")
@pytest.mark.parametrize("devices", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_mp_num_sets_tensor_parallel_size(devices: dict[str, str]) -> None:
    found = read({}, None, PORT_VARIABLES | {"MP_NUM": "2"} | devices, load("paddlenlp")).configuration.engine
    assert found.tensor_parallel_size == 2


def test_model_name_sets_quantization_and_speculation() -> None:
    def engine(name: str) -> Any:
        return read({}, None, PORT_VARIABLES | {"model_name": name}, load("paddlenlp")).configuration.engine

    assert engine("Qwen/Qwen3-0.6B").quantization == "none"
    found = engine("Qwen/Qwen3-0.6B/weight_only_int4")
    assert (found.model, found.quantization) == ("Qwen/Qwen3-0.6B", "wint4")
    assert json.loads(engine("a/b-MTP/a8w8").speculative_config) == {"method": "mtp"}
