"""Examples of PaddleNLP's documentation, run unmodified: shell commands and Python programs.

Only ports, paths and model names are replaced, and a single device is used. Quotes and indentation that the web page
lost are restored in the programs.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import worker_pids
from shell import write_programs
from test_hub import NEW, Hub
from test_paddlenlp_server import free_port_variables

from penstock import demo

NAME = "org/chat/weight_only_int8"


class Terminal:
    """Runs documented scripts in a separate folder, with Penstock's commands on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_port_variables()
        bin = write_programs(folder / "bin")
        (folder / "download_model.py").symlink_to(bin / "download_model.py")
        path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        unbound = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.environment = {**os.environ, **unbound, "PATH": path, "XDG_RUNTIME_DIR": str(folder)}

    def printed(self, script: str) -> str:
        """Return the documented script with ports and model folder replaced by those of the test."""
        old = {"HEALTH_HTTP_PORT": "8110", "SERVICE_GRPC_PORT": "8811", "METRICS_HTTP_PORT": "8722"}
        for name, port in {**old, "SERVICE_HTTP_PORT": "9965"}.items():
            script = script.replace(port, self.ports[name])
        return script.replace("/models", str(demo.CHAT))

    def run(self, script: str, command: tuple[str, ...] = ("bash", "-c")) -> tuple[int, str]:
        """Run a script; return (exit status, standard output and error)."""
        arguments = [*command, self.printed(script)]
        ran = subprocess.run(
            arguments, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        return ran.returncode, ran.stdout + ran.stderr

    def python(self, program: str) -> str:
        """Run a Python program successfully; return its output."""
        status, output = self.run(program, (sys.executable, "-c"))
        assert status == 0, output
        return output


ENVIRONMENT = """
# 单/多卡推理配置。自行修改。
## 如果是单卡推理,使用0卡,设置如下环境变量。
export MP_NUM=1
export CUDA_VISIBLE_DEVICES=0
## 如果是多卡推理,除了模型导出得满足2卡要求,同时设置如下环境变量。
# export MP_NUM=2
# export CUDA_VISIBLE_DEVICES=0,1
# 如部署场景无流式Token返回需求,可配置如下开关
# 服务将会将每个请求的所有生成Token一次性返回
# 降低服务逐个Token发送压力
# 默认关闭
# export DISABLE_STREAMING=1
# 配置数据服务。需要自行修改HTTP_PORT、GRPC_PORT、METRICS_PORT和INFER_QUEUE_PORT。(请事先检查端口可用)
export HEALTH_HTTP_PORT="8110" # 探活服务的http端口(当前仅用于健康检查、探活)
export SERVICE_GRPC_PORT="8811" # 模型推服务的grpc端口
export METRICS_HTTP_PORT="8722" # 模型服务中监督指标的端口
export INTER_PROC_PORT="8813" # 模型服务内部使用的端口
export SERVICE_HTTP_PORT="9965" # 服务请求HTTP端口号,如不配置,默认为-1,即服务只支持GRPC协议
# MAX_SEQ_LEN: 服务会拒绝input token数量超过MAX_SEQ_LEN的请求,并返回错误提示
# MAX_DEC_LEN: 服务会拒绝请求中max_dec_len/min_dec_len超过此参数的请求,并返回错误提示
export MAX_SEQ_LEN=8192
export MAX_DEC_LEN=1024
export BATCH_SIZE="48" # 设置最大Batch Size,模型可同时并发处理的最大输入数量,不能高于128
export BLOCK_BS="5" # 缓存Block支持的最大Query Batch Size,如果出现out of memory 错误,尝试减少该数值
export BLOCK_RATIO="0.75" # 一般可以设置成 输入平均Token数/(输入+输出平均Token数)
export MAX_CACHED_TASK_NUM="128" # 服务缓存队列最大长度,队列达到上限后,会拒绝新的请求,默认128
# 开启HTTP接口配置如下参数
export PUSH_MODE_HTTP_WORKERS="1" # HTTP服务进程数,在 PUSH_MODE_HTTP_PORT 配置的情况下有效,最高设置到8即可,默认为1
"""
START = """
export MODEL_DIR=${MODEL_DIR:-"/models"}
start_server
# 重新启动服务前,需要停止服务,执行 stop_server
"""
ADDRESS = """
ip = "127.0.0.1"
service_http_port = "9965" # 服务配置的
"""


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("terminal"))
    status, output = terminal.run(ENVIRONMENT + START)
    assert status == 0, output
    yield terminal
    assert terminal.run("stop_server")[1].startswith("Stopped process")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Terminal]:
    """Terminal in which no server runs, with a local model hub."""
    terminal, hub = Terminal(tmp_path), Hub()
    hub.files[NEW] = {path.name: path.read_bytes() for path in demo.CHAT.iterdir() if path.is_file()}
    terminal.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
    yield terminal
    terminal.run("stop_server 10")
    hub.stop()


# --- Requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("paddlenlp", "/v2/health/live", "/v2/health/ready")
def test_health_endpoints_return_200(terminal: Terminal) -> None:
    for url in ("http://127.0.0.1:8110/v2/health/live", "http://127.0.0.1:8110/v2/health/ready"):
        assert httpx.get(terminal.printed(url)).status_code == 200
        assert terminal.run(f"curl -sS -o /dev/null -w '%{{http_code}}' {url}") == (0, "200")


def test_documented_http_requests_are_streamed(terminal: Terminal) -> None:
    output = terminal.python(f"""
import uuid
import json
import requests
{ADDRESS}
url = f"http://{{ip}}:{{service_http_port}}/v1/chat/completions"
req_id = str(uuid.uuid1())
data_single = {{
"text": "Hello, how are you?",
"req_id": req_id,
"max_dec_len": 64,
"stream": True,
}}
# 逐token返回
res = requests.post(url, json=data_single, stream=True)
for line in res.iter_lines():
    print(json.loads(line))
# 多轮对话
data_multi = {{
"messages": [
{{"role": "user", "content": "Hello, who are you"}},
{{"role": "system", "content": "I'm a helpful AI assistant."}},
{{"role": "user", "content": "List 3 countries and their capitals."}},
],
"req_id": req_id,
"max_dec_len": 64,
"stream": True,
}}
# 逐token返回
res = requests.post(url, json=data_multi, stream=True)
for line in res.iter_lines():
    print(json.loads(line))
""")
    chunks = [ast.literal_eval(line) for line in output.splitlines()]
    assert len({chunk["req_id"] for chunk in chunks}) == 1
    assert [chunk["send_idx"] for chunk in chunks].count(0) == sum(chunk["is_end"] for chunk in chunks) == 2
    assert all((chunk["error_msg"], chunk["error_code"]) == ("", 0) for chunk in chunks)
    assert all(isinstance(chunk["token"], str) for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False])
def test_answers_have_documented_fields(terminal: Terminal, stream: bool) -> None:
    url = terminal.printed("http://127.0.0.1:9965/v1/chat/completions")
    expected = {"token", "is_end", "send_idx"} if stream else {"tokens_all"}
    good = httpx.post(url, json={"text": "Hello, how are you?", "max_dec_len": 4, "stream": stream}, timeout=60)
    for line in good.iter_lines():
        assert expected | {"error_msg", "error_code"} <= json.loads(line).keys()
        assert (json.loads(line)["error_msg"], json.loads(line)["error_code"]) == ("", 0)
    bad = httpx.post(url, json={"text": "Hello", "max_dec_len": 1025, "stream": stream}, timeout=60)
    (line,) = bad.iter_lines()
    assert json.loads(line)["error_msg"] and json.loads(line)["error_code"] != 0


@pytest.mark.slow
@pytest.mark.row("paddlenlp", 'openai.Client(base_url="http://HOST:PORT/v1/chat/completions")')
def test_documented_openai_client_program_prints_answers(terminal: Terminal) -> None:
    output = terminal.python(f"""
import openai
{ADDRESS}
client = openai.Client(base_url=f"http://{{ip}}:{{service_http_port}}/v1/chat/completions", api_key="EMPTY_API_KEY")
# 非流式返回
response = client.completions.create(
model="default",
prompt="Hello, how are you?",
max_tokens=50,
stream=False,
)
print(response)
print("\\n")
# 流式返回
response = client.completions.create(
model="default",
prompt="Hello, how are you?",
max_tokens=100,
stream=True,
)
for chunk in response:
    if chunk.choices[0] is not None:
        print(chunk.choices[0].text, end='')
print("\\n")
# Chat completion
# 非流式返回
response = client.chat.completions.create(
model="default",
messages=[
{{"role": "user", "content": "Hello, who are you"}},
{{"role": "system", "content": "I'm a helpful AI assistant."}},
{{"role": "user", "content": "List 3 countries and their capitals."}},
],
temperature=0,
max_tokens=64,
stream=False,
)
print(response)
print("\\n")
# 流式返回
response = client.chat.completions.create(
model="default",
messages=[
{{"role": "user", "content": "Hello, who are you"}},
{{"role": "system", "content": "I'm a helpful AI assistant."}},
{{"role": "user", "content": "List 3 countries and their capitals."}},
],
temperature=0,
max_tokens=64,
stream=True,
)
for chunk in response:
    if chunk.choices[0].delta is not None:
        print(chunk.choices[0].delta.content, end='')
print("\\n")
""")
    completion, rest = output.split("\n", 1)
    streamed, chat = rest.split("ChatCompletion(", 1)
    assert completion.startswith("Completion(id=") and streamed.strip()
    text = chat.split("\n", 1)[1].strip()
    assert text and f"content={text!r}" in chat  # the stream equals the whole answer, and no None is printed


# --- Start commands ---------------------------------------------------------------------------------------------------

PORTS = "\n".join(line for line in ENVIRONMENT.splitlines() if "_PORT=" in line) + "\nexport BLOCK_BS=5\n"


@pytest.mark.slow
@pytest.mark.row("paddlenlp", "docker run … start_server $model_name && tail -f /dev/null", "org/name/weight_only_int8")
def test_docker_run_command_serves_model_by_name(elsewhere: Terminal) -> None:
    """The script runs the command that the documentation passes to ``docker run``."""
    script = f"{PORTS}export MODEL_DIR=$PWD model_name={NAME}\n"
    script += "/bin/bash -c -ex 'start_server $model_name && tail -f /dev/null'"
    command = ["bash", "-c", elsewhere.printed(script)]
    running = subprocess.Popen(
        command,
        cwd=elsewhere.folder,
        env=elsewhere.environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    try:
        assert any(line.startswith("Ready: process") for line in running.stdout)
        assert running.poll() is None
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait()
        running.stdout.close()
    log = (elsewhere.folder / "log" / "server.log").read_text()
    assert str(elsewhere.folder / NAME) in log and "wint8" in log
    assert httpx.get(elsewhere.printed("http://127.0.0.1:8110/v2/health/ready")).status_code == 200


@pytest.mark.slow
@pytest.mark.row("paddlenlp", "download_model.py", "--model_name", "--dir", "start_server [model_name]")
def test_downloaded_model_is_found_by_start_server(elsewhere: Terminal) -> None:
    single = f"""
export MODEL_PATH=${{MODEL_PATH:-$PWD}}
export model_name="{NAME}"
python download_model.py --model_name $model_name --dir $MODEL_PATH --nnodes 1
"""
    status, output = elsewhere.run(single)
    assert status == 0 and (elsewhere.folder / NAME / "model.safetensors").exists(), output
    elsewhere.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # unreachable: start_server must not download anything
    status, output = elsewhere.run(f'{PORTS}export MODEL_DIR=$PWD\nmodel_name="{NAME}"\nstart_server $model_name\n')
    assert status == 0 and "Ready: process" in output, output


@pytest.mark.slow_after(1)
@pytest.mark.row("paddlenlp", "--nnodes", "-n", "--mode", "-M")
@pytest.mark.parametrize(
    "more", ['--mode "master"', '--mode "slave"', '--mode "master" --speculate_model_path $MODEL_PATH']
)
def test_each_node_downloads_whole_checkpoint(elsewhere: Terminal, more: str) -> None:
    several = f"""
export MODEL_PATH=${{MODEL_PATH:-$PWD}}
export model_name="org/chat-2nodes/weight_only_int8"
python download_model.py --model_name $model_name --dir $MODEL_PATH --nnodes 2 {more}
"""
    status, output = elsewhere.run(several)
    assert status == 0 and (elsewhere.folder / "org/chat-2nodes/weight_only_int8/model.safetensors").exists(), output
    start = 'model_name="org/chat-2nodes/weight_only_int8"\nstart_server $model_name\n'
    status, output = elsewhere.run(PORTS + start)
    assert status == 2 and "model_name: org/chat-2nodes/weight_only_int8 is for 2 nodes, but MP_NNODE is 1" in output


SEVERAL = """
export POD_IPS=10.0.0.1,10.0.0.2
export POD_0_IP=10.0.0.1
export MP_NNODE=2 # 节点数为2表明为2机服务
export MP_NUM=16 # 模型分片为16
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
"""


@pytest.mark.row("paddlenlp", "POD_IPS")
def test_machine_outside_pod_ips_is_rejected(elsewhere: Terminal) -> None:
    status, output = elsewhere.run(PORTS + SEVERAL.replace("10.0.0.", "198.51.100.") + START)
    assert status == 2 and "POD_IPS: none of 198.51.100.1, 198.51.100.2 is an address of this machine" in output


@pytest.mark.slow
@pytest.mark.row(
    "paddlenlp", "MP_NUM", "CUDA_VISIBLE_DEVICES", "mpirun start_server", "mpirun stop_server", "SERVICE_HTTP_PORT"
)
@pytest.mark.usefixtures("every_core")
def test_mpirun_starts_and_stops_one_server(elsewhere: Terminal) -> None:
    """mpirun starts one bound process per core. The server still uses all cores, and starts its ranks itself."""
    two = "export MP_NUM=2\nexport CUDA_VISIBLE_DEVICES=0,1\n"
    assert two in ENVIRONMENT.replace("# ", "")
    status, output = elsewhere.run(f"{PORTS}{two}export MODEL_DIR=/models SERVICE_HTTP_PORT=-1\nmpirun start_server")
    assert status == 0 and output.count("Ready: process") == 1, output
    server = int(output.partition("Ready: process ")[2].partition(",")[0])
    assert sorted(worker_pids(server)) == ["penstock-rank0", "penstock-rank1"]
    assert os.sched_getaffinity(server) == os.sched_getaffinity(0)
    assert "gRPC at 127.0.0.1:" in output and "without HTTP" in (elsewhere.folder / "log" / "server.log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(elsewhere.printed("http://127.0.0.1:9965/v2/health/live"))
    assert elsewhere.run("mpirun stop_server") == (0, f"Stopped process {server}.\n")


def test_mpirun_on_more_nodes_than_mp_nnode_is_rejected(elsewhere: Terminal) -> None:
    elsewhere.environment |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_SIZE": "2"}  # set by MPICH
    message = "MP_NNODE: is 1, but mpirun started 2 ranks, only 1 of them on this node"
    remedy = "set MP_NNODE to the number of nodes"
    assert elsewhere.run("start_server") == (2, f"start_server: {message}: {remedy}\n")
