"""Examples of Ascend's documentation on vLLM, run unmodified: rank tables, start commands and requests.

Only hosts, ports and paths are replaced; CPU cores take the place of NPUs.
"""

# ruff: noqa: E501 (lines of the documentation)

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served, free_ports
from shell import Shell, with_context_length

from penstock.cli.main import main

GLOBAL = """
{
    "version": "1.0",
    "status": "completed",
    "server_group_list": [
        {
            "group_id": "0",
            "server_count": "1",
            "server_list": [
                {
                    "server_id": "localhost",
                    "server_ip": "localhost"
                }
            ]
        },
        {
            "group_id": "1",
            "server_count": "1",
            "server_list": [
                {
                    "server_id": "localhost",
                    "server_ip": "localhost",
                    "device": [
                        {
                            "device_id": "4",
                            "device_ip": "10.**.**.22",
                            "rank_id": "0"
                        },
                        {
                            "device_id": "5",
                            "device_ip": "10.**.**.23",
                            "rank_id": "1"
                        }
                    ]
                }
            ]
        },
        {
            "group_id": "2",
            "server_count": "1",
            "server_list": [
                {
                    "server_id": "localhost",
                    "server_ip": "localhost",
                    "device": [
                        {
                            "device_id": "6",
                            "device_ip": "29.**.**.56",
                            "rank_id": "0"
                        },
                        {
                            "device_id": "7",
                            "device_ip": "29.**.**.72",
                            "rank_id": "1"
                        }
                    ]
                }
            ]
        }
    ]
}
"""
LOCAL = """
{
    "version": "1.0",
    "status": "completed",
    "group_id": "0",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "localhost",
            "server_ip": "localhost",
            "device": [
                {
                    "device_id": "6",
                    "device_ip": "29.**.**.56",
                    "rank_id": "0"
                },
                {
                    "device_id": "7",
                    "device_ip": "29.**.**.72",
                    "rank_id": "1"
                }
            ]
        }
    ]
}
"""
GEN = """
export LLM_TOOLS_PATH=${root_path_of_AscendCloud-LLM}/llm_tools
python ${LLM_TOOLS_PATH}/PD_separate/pd_ranktable_tools.py --mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server --save-dir ./save_dir
"""
MERGE = """
export LLM_TOOLS_PATH=${root_path_of_AscendCloud-LLM}/llm_tools
python ${LLM_TOOLS_PATH}/PD_separate/pd_ranktable_tools.py --mode merge --global-ranktable-list ./ranktable/global_ranktable_0.0,0,0.json ./ranktable/global_ranktable_1.1.1.1.json --save-dir ./save_dir
"""
START = """
sh AscendCloud-LLM/llm_tools/PD_separate/start_servers.sh \\
    --model=${model} \\
    --tensor-parallel-size=1 \\
    --max-model-len=4096 \\
    --max-num-seqs=256 \\
    --max-num-batched-tokens=4096 \\
    --served-model-name ${served-model-name}
"""
"""Documented start command of one instance, without ``--host`` and ``--port``. The variable ``served`` is unset: the
shell expands ``${served-model-name}`` to ``model-name``."""
SEPARATE = """
export GLOBAL_RANK_TABLE_FILE_PATH=global_ranktable_10.**.**.18.json
export RANK_TABLE_FILE_PATH=local_rank_table_10.**.**.18_{instance}.json
export NODE_PORTS=8088,8089
export USE_OPENAI=1

sh AscendCloud-LLM/llm_tools/PD_separate/start_servers.sh \\
    --model=${model} \\
    --tensor-parallel-size=2 \\
    --max-model-len=4096 \\
    --max-num-seqs=256 \\
    --max-num-batched-tokens=4096 \\
    --host=0.0.0.0 \\
    --port={port} \\
    --served-model-name ${served-model-name}
"""
CHAT = """
curl -X POST http://${docker_ip}:8080/v1/chat/completions \\
-H "Content-Type: application/json" \\
-d '{
    "model": "${container_model_path}",
    "messages": [
        {
            "role": "user",
            "content": "hello"
        }
    ],
    "max_tokens": 100,
    "top_k": -1,
    "top_p": 1,
    "temperature": 0,
    "ignore_eos": false,
    "stream": false
}'
"""
GUIDED = r"""
curl -X POST http://${docker_ip}:8080/v1/completions \
-H "Content-Type: application/json" \
-d '{
    "model": "${container_model_path}",
    "prompt": "Meet our valorous character, named Knight, who has reached the age of 32. Clad in impenetrable plate armor, Knight is well-prepared for any battle. Armed with a trusty sword and boasting a strength score of 90, this character stands as a formidable warrior on the field.Please provide details for this character, including their Name, Age, preferred Armor, Weapon, and Strength",
    "max_tokens": 200,
    "temperature": 0,
    "guided_json": "{\"title\": \"Character\", \"type\": \"object\", \"properties\": {\"name\": {\"title\": \"Name\", \"maxLength\": 10, \"type\": \"string\"}, \"age\": {\"title\": \"Age\", \"type\": \"integer\"}, \"armor\": {\"$ref\": \"#/definitions/Armor\"}, \"weapon\": {\"$ref\": \"#/definitions/Weapon\"}, \"strength\": {\"title\": \"Strength\", \"type\": \"integer\"}}, \"required\": [\"name\", \"age\", \"armor\", \"weapon\", \"strength\"], \"definitions\": {\"Armor\": {\"title\": \"Armor\", \"description\": \"An enumeration.\", \"enum\": [\"leather\", \"chainmail\", \"plate\"], \"type\": \"string\"}, \"Weapon\": {\"title\": \"Weapon\", \"description\": \"An enumeration.\", \"enum\": [\"sword\", \"axe\", \"mace\", \"spear\", \"bow\", \"crossbow\"], \"type\": \"string\"}}}"
}'
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Shell in the folder with the unpacked archive."""
    folder = tmp_path_factory.mktemp("root")
    assert main(["shims", str(folder / "AscendCloud-LLM"), "ascend-vllm"]) == 0
    result = Shell(folder)
    result.environment |= {
        "root_path_of_AscendCloud": str(folder / "AscendCloud-LLM"),
        "model": str(with_context_length(folder / "model", 4096)),
    }
    return result


@pytest.fixture(scope="module")
def served(shell: Shell) -> Iterator[Served]:
    flags = ("--num-gpu-blocks-override", "100")
    command = shell.command(f"export USE_OPENAI=1\nexec {START.strip()}")
    with Served(*flags, command=command, environment=shell.environment) as served:
        yield served


def without_hosts(text: str) -> str:
    """Return a rank table as compact JSON with empty addresses and the original order of keys."""
    return json.dumps(json.loads(re.sub(r'"(server_id|server_ip|device_ip)":\s*"[^"]*"', r'"\1": ""', text)))


def ask(shell: Shell, served: Served, request: str) -> Any:
    """Send a documented request to this server, with its model name; return the parsed response."""
    text = request.replace("http://${docker_ip}:8080", served.root).replace("${container_model_path}", served.name)
    return json.loads(shell.output_of(text))


# --- Step 5: rank tables ----------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "pd_ranktable_tools.py", "--mode gen", "--prefill-server-list", "--decode-server-list")
@pytest.mark.row("vllm", "--api-server", "--save-dir", "global_ranktable_IP.json")
@pytest.mark.row("vllm", "local_ranktable_IP_DEVICES.json", "local_ranktable_IP_host.json")
def test_generated_rank_tables_match_documentation(shell: Shell) -> None:
    shell.output_of(GEN)
    folder = shell.folder / "save_dir"
    (ip,) = {file.name.split("_")[2].removesuffix(".json") for file in folder.glob("*.json")}
    names = {f"global_ranktable_{ip}.json", *(f"local_ranktable_{ip}_{part}.json" for part in ("45", "67", "host"))}
    assert {file.name for file in folder.iterdir()} == names
    assert without_hosts((folder / f"global_ranktable_{ip}.json").read_text()) == without_hosts(GLOBAL)
    assert without_hosts((folder / f"local_ranktable_{ip}_67.json").read_text()) == without_hosts(LOCAL)
    host = json.loads((folder / f"local_ranktable_{ip}_host.json").read_text())
    assert host["server_list"] == [{"server_id": ip, "server_ip": ip}]
    indented = (folder / f"global_ranktable_{ip}.json").read_text().splitlines()
    assert indented[3] == '    "server_group_list": ['


@pytest.mark.row("vllm", "--mode merge", "--global-ranktable-list", "--ip", "global_ranktable_merge.json")
def test_rank_tables_of_two_machines_are_merged(shell: Shell) -> None:
    tool = "python AscendCloud-LLM/llm_tools/PD_separate/pd_ranktable_tools.py --mode gen --save-dir ranktable"
    shell.output_of(f"{tool} --ip 0.0,0,0 --prefill-server-list 0,1 2,3 --api-server")
    shell.output_of(f"{tool} --ip 1.1.1.1 --decode-server-list 0,1")
    assert shell.output_of(MERGE) == "save_dir/global_ranktable_merge.json\n"
    found = json.loads((shell.folder / "save_dir" / "global_ranktable_merge.json").read_text())
    groups = found["server_group_list"]
    assert [(group["group_id"], group["server_count"]) for group in groups] == [("0", "1"), ("1", "2"), ("2", "1")]
    assert [server["server_ip"] for group in groups for server in group["server_list"]] == [*["0.0,0,0"] * 3, "1.1.1.1"]
    assert [device["rank_id"] for server in groups[1]["server_list"] for device in server["device"]] == list("0101")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mode merge --global-ranktable-list global_a global_a", "have 2 API servers instead of one"),
        ("--mode merge --global-ranktable-list global_b global_b", "have 0 API servers instead of one"),
        ("--mode merge --global-ranktable-list global_a global_b global_b", "device 0 of b is in two instances"),
        ("--mode merge --global-ranktable-list local_b", "local_b cannot be read as a global rank table"),
        ("--mode merge --global-ranktable-list nothing", "nothing cannot be read as a global rank table"),
        (
            "--mode merge --global-ranktable-list wrong_count",
            "wrong_count: server_count of group 2 is 2, but it has 1 servers",
        ),
        ("--mode merge --global-ranktable-list wrong_rank", "wrong_rank: rank_id must count from 0 in each instance"),
        ("--mode merge", "global_ranktable_list: is missing"),
        ("--mode merge --global-ranktable-list global_a --api-server", "api_server: requires --mode gen"),
        ("--mode gen --global-ranktable-list global_a", "global_ranktable_list: requires --mode merge"),
        ("--mode gen", "gen needs --prefill-server-list, --decode-server-list or --api-server"),
        (
            "--mode gen --prefill-server-list 4,5 --decode-server-list 5,6",
            "decode_server_list: device 5 is given twice",
        ),
        (
            "--mode gen --prefill-server-list 4,x",
            "prefill_server_list: '4,x' is not a comma-separated list of device numbers",
        ),
        ("--mode gen --prefill-server-list 1,12 11,2", "_112.json, like another instance"),
        ("--mode gen --api-server --save-dir global_a", "save_dir: cannot write to global_a"),
        ("--mode both", "invalid choice: 'both'"),
    ],
)
def test_invalid_rank_table_is_reported_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main("ranktable --mode gen --ip a --api-server".split()) == 0
    assert main("ranktable --mode gen --ip b --decode-server-list 0".split()) == 0
    for old, new in {"global_ranktable_a": "global_a", "global_ranktable_b": "global_b"}.items():
        Path(f"{old}.json").rename(new)
    Path("local_ranktable_b_0.json").rename("local_b")
    table = Path("global_b").read_text()
    Path("wrong_count").write_text(table.replace('"server_count": "1"', '"server_count": "2"'))
    Path("wrong_rank").write_text(table.replace('"rank_id": "0"', '"rank_id": "1"'))
    capsys.readouterr()
    try:
        status = main(["ranktable", *arguments.split()])
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    assert status == 2 and not output.out
    assert message in output.err and len(output.err.splitlines()) == 1


# --- Steps 6 to 8: start and requests ---------------------------------------------------------------------------------


@pytest.mark.row("vllm", "GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS")
def test_prefill_and_decode_instances_equal_single_instance(shell: Shell, served: Served, tmp_path: Path) -> None:
    """All documented steps are run, from rank tables to a chat at the scheduler's port. The scheduler has no engine."""
    folder, ports = f"tables{tmp_path.name}", free_ports(3)
    shell.output_of(GEN.replace("./save_dir", folder))
    (table,) = (shell.folder / folder).glob("global_ranktable_*.json")
    address = table.stem.rpartition("_")[2]
    environment = {**shell.environment, "XDG_CONFIG_HOME": str(tmp_path)}

    def started(instance: str, port: int) -> Served:
        script = SEPARATE.replace("{instance}", instance).replace("--port={port} ", f"--port={port} ")
        script = script.replace("=8088,8089", f"={ports[0]},{ports[1]}").replace(
            "local_rank_table_", "local_ranktable_"
        )
        script = script.replace("global_rank", f"{folder}/global_rank").replace("local_rank", f"{folder}/local_rank")
        command = shell.command(script.replace("10.**.**.18", address).replace("\nsh ", "\nexec sh "))
        flags = ("--host", "0.0.0.0", "--port", str(port), "--num-gpu-blocks-override", "100")
        return Served(*flags, command=command, environment=environment)

    with ExitStack() as stack:
        servers = [started(name, port) for name, port in zip(("45", "67", "host"), ports, strict=True)]
        prefill, decode, scheduler = [stack.enter_context(server) for server in servers]
        instances = httpx.get(f"{scheduler.root}/penstock/instances").json()["instances"]
        assert {instance["role"] for instance in instances} <= {"prefill", "decode"} and instances
        assert ask(shell, scheduler, CHAT)["choices"] == ask(shell, served, CHAT)["choices"]
        assert ask(shell, scheduler, GUIDED)["choices"] == ask(shell, served, GUIDED)["choices"]
        assert [len(server.pids["engine"]) for server in (prefill, decode, scheduler)] == [1, 1, 0]


@pytest.mark.row("vllm", "start_servers.sh", "POST /v1/chat/completions", "--served-model-name")
def test_documented_chat_is_answered(shell: Shell, served: Served) -> None:
    assert served.name == "model-name"
    answer = ask(shell, served, CHAT)
    assert answer["object"] == "chat.completion" and answer["model"] == "model-name"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length") and answer["usage"]["completion_tokens"] <= 100


@pytest.mark.row("vllm", "POST /v1/completions", "guided_json")
def test_guided_json_constrains_answer(shell: Shell, served: Served) -> None:
    answer = ask(shell, served, GUIDED)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", choice
    found = json.loads(choice["text"])
    assert set(found) == {"name", "age", "armor", "weapon", "strength"} and len(found["name"]) <= 10
    assert isinstance(found["age"], int) and isinstance(found["strength"], int)
    assert found["armor"] in ("leather", "chainmail", "plate")
    assert found["weapon"] in ("sword", "axe", "mace", "spear", "bow", "crossbow")


@pytest.mark.row("vllm", "USE_OPENAI=1", "model")
def test_model_is_required(served: Served) -> None:
    paths: dict[str, dict[str, Any]] = {"completions": {"prompt": "x"}, "chat/completions": {"messages": []}}
    for path, body in (paths | {"embeddings": {"input": "x"}}).items():
        for model in ({}, {"model": None}):
            missing = httpx.post(f"{served.url}/{path}", json=body | model)
            assert missing.status_code == 400 and missing.json()["error"]["param"] == "model", path
            assert missing.json()["error"]["message"] == "model: is missing; must be model-name"
            assert missing.json()["error"]["code"] == 400
        for name, status in (("another", 404), (["model-name"], 400)):
            wrong = httpx.post(f"{served.url}/{path}", json=body | {"model": name})
            assert wrong.status_code == status and wrong.json()["error"]["param"] == "model", path
    assert httpx.post(f"{served.root}/generate", json={"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.row("vllm", "temperature", "top_p", "top_k", "max_tokens", "stream", "n")
def test_sampling_defaults_match_documentation(served: Served) -> None:
    """The model's ``generation_config.json`` is ignored: explicit documented defaults give the same sample."""
    client = openai.OpenAI(base_url=served.url, api_key="none")
    fields: dict[str, Any] = {"model": served.name, "prompt": "Once upon a time", "seed": 3}
    fields["extra_body"] = {"ignore_eos": True}
    default = client.completions.create(**fields)
    explicit = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "stream": False, "n": 1}
    explicit["extra_body"] = {"ignore_eos": True, "top_k": -1}
    assert default.choices[0].text == client.completions.create(**fields | explicit).choices[0].text
    recommended = {"temperature": 0.4, "top_p": 0.95, "extra_body": {"ignore_eos": True, "top_k": 20}}
    cold = client.completions.create(**fields | recommended)
    assert cold.choices[0].text != default.choices[0].text
    assert default.usage and default.usage.completion_tokens == 16 and len(default.choices) == 1
