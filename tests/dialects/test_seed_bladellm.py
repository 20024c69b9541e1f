"""Examples of BladeLLM's documentation, run unmodified: server command, service.json, request and answer.

Only hosts, ports and model paths are replaced, and a single device is used.
"""

# ruff: noqa: E501 (lines of the documentation)

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served
from shell import Shell

from penstock import demo

COMMAND = "blade_llm_server --port 8081 --model /mnt/model/bloom_7b/"
SERVICE = """
{
    "name": "blade_llm_bloom_server", // 服务名称
    "containers": [
        {
            // 镜像和命令,请使用“-vpc”后缀的URL,其中<region_id>配置为区域ID,例如华东1(杭州)为cn-hangzhou
            // 请正确填写版本号
            "image": "eas-registry-vpc.<region_id>.cr.aliyuncs.com/pai-eas/blade-llm:0.8.0",
            "command": "blade_llm_server --port 8081 --model /mnt/model/bloom_7b/", // 端口号需要与"command"中的"--port"参数配置一致
            "port": 8081
        }
    ],
    "storage": [
        {
            // 模型挂载地址
            "mount_path": "/mnt/model/bloom_7b/",
            "oss": {
                "endpoint": "oss-<region_id>-internal.aliyuncs.com",
                // 模型配置所在的OSS存储路径
                "path": "oss://examplebucket/bloom_7b/"
            }
        },
        {
            // 共享内存, 多卡推理时务必配置
            "empty_dir": {
                "medium": "memory",
                "size_limit": 64
            },
            "mount_path": "/dev/shm"
        }
    ],
    "metadata": {
        "instance": 1,
        "memory": 64000, // 内存,单位是 MB
        "cpu": 16,
        "gpu": 1,
        "resource": "eas-r-xxxxxx" // 资源组ID
    }
}
"""
REQUEST = """
# Call EAS service
curl -X POST \\
    -H "Content-Type: application/json" \\
    -H "Authorization: AUTH_TOKEN_FOR_EAS" \\
    -d '{"prompt":"What is the capital of Canada?", "stream":"true"}' \\
    <service_url>/v1/completions
"""
ANSWER = """
data: {"id":"91f9a28a-f949-40fb-b720-08ceeeb2****","choices":[{"finish_reason":"","index":0,"logprobs":null,"text":" The"}],"object":"text_completion","usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8},"error_info":null}

data: {"id":"91f9a28a-f949-40fb-b720-08ceeeb2****","choices":[{"finish_reason":"stop","index":0,"logprobs":null,"text":""}],"object":"text_completion","usage":{"prompt_tokens":7,"completion_tokens":8,"total_tokens":15},"error_info":null}

data: [DONE]
"""
"""First and last chunk of the documented stream."""


def with_local_model(text: str) -> str:
    return text.replace("/mnt/model/bloom_7b/", f"{demo.CHAT}/")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("eas"))


@pytest.fixture(scope="module")
def served(shell: Shell) -> Iterator[Served]:
    """Server started by the documented command; a second ``--port`` overrides the documented port."""
    with Served(command=shell.command(f"exec {with_local_model(COMMAND)}"), environment=shell.environment) as served:
        yield served


def events(text: str) -> list[Any]:
    *found, done = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(event) for event in found]


def outline(document: Any) -> Any:
    """Return the structure of a JSON document: keys in their order, and types of values."""
    if isinstance(document, dict):
        return [(name, outline(value)) for name, value in document.items()]
    return [outline(value) for value in document] if isinstance(document, list) else type(document).__name__


@pytest.mark.row("bladellm", "Authorization: TOKEN", '"stream": "true"', "chunks", "max_tokens")
def test_streamed_chunks_match_documented_answer(shell: Shell, served: Served) -> None:
    found = events(shell.output_of(REQUEST.replace("<service_url>", served.root)))
    first, last = events(ANSWER)
    *chunks, end = found
    assert {json.dumps(outline(chunk)) for chunk in chunks} == {json.dumps(outline(first))}
    assert outline(end) == outline(last)
    assert all(chunk["choices"][0]["finish_reason"] == "" and chunk["choices"][0]["text"] for chunk in chunks)
    assert end["choices"][0]["text"] == "" and end["choices"][0]["finish_reason"] in ("stop", "length")
    assert len({chunk["id"] for chunk in found}) == 1
    for chunk in found:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert chunks[0]["usage"]["completion_tokens"] >= 1 and end["usage"]["completion_tokens"] <= 16


@pytest.mark.row("bladellm", "--port", "--model")
def test_documented_command_serves_model_under_its_path(served: Served) -> None:
    assert served.name == f"{demo.CHAT}/"


@pytest.mark.row("bladellm", "name", "containers[].command", "containers[].port", "containers[].image")
@pytest.mark.row("bladellm", "storage[].mount_path", "oss", "storage[].empty_dir", "metadata.cpu", "metadata.resource")
def test_documented_service_json_is_served(shell: Shell, served: Served) -> None:
    Path(shell.folder, "service.json").write_text(with_local_model(SERVICE), encoding="utf-8")
    command = shell.command("exec penstock serve --service-json service.json")
    with Served(command=command, environment=shell.environment) as service:
        assert service.name == "blade_llm_bloom_server"
        text = shell.output_of(REQUEST.replace("<service_url>", service.root))
        assert outline(events(text)[-1]) == outline(events(ANSWER)[-1])
        log = "\n".join(service.lines)
    ignored = {"containers[0].image": True, "metadata.memory": True, "metadata.resource": True}
    ignored["metadata.cpu"] = len(os.sched_getaffinity(0)) < 16
    ignored["storage /dev/shm"] = shutil.disk_usage("/dev/shm").total < 64 * 2**30
    for name, is_ignored in ignored.items():
        assert (f"{name} of the service is ignored: " in log) == is_ignored, name


@pytest.mark.row("bladellm", "storage[].mount_path")
def test_missing_mount_path_is_reported(shell: Shell) -> None:
    Path(shell.folder, "unmounted.json").write_text(SERVICE, encoding="utf-8")
    ran = shell.run("penstock serve --service-json unmounted.json")
    assert ran.returncode == 2
    message = "/mnt/model/bloom_7b does not exist: copy the content of oss://examplebucket/bloom_7b/ to it, or mount it"
    assert ran.stderr.splitlines()[-1] == f"penstock serve: service_json: {message}"
