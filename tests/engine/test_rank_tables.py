"""Rank tables: the roles, cores and instances they set, and error messages for inconsistent tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import usage_error

from penstock.cli.main import main
from penstock.cluster.deployment import bind_devices, with_rank_tables
from penstock.config.options import Configuration, EngineOptions, ServerOptions

TWO = ("--tensor-parallel-size", "2")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the rank tables of one machine: a router, a prefill instance and a decode instance."""
    monkeypatch.chdir(tmp_path)
    command = "ranktable --mode gen --ip 10.0.0.1 --prefill-server-list 4,5 --decode-server-list 6,7 --api-server"
    assert main(command.split()) == 0
    return tmp_path


def configuration(name: str, ports: str = "", **engine: Any) -> Configuration:
    """Return the configuration of one instance of the tables."""
    server = ServerOptions(
        global_rank_table="global_ranktable_10.0.0.1.json",
        rank_table=f"local_ranktable_10.0.0.1_{name}.json",
        node_ports=tuple(ports.split(",")) if ports else (),
        port=9000,
    )
    return with_rank_tables(Configuration(server=server, engine=EngineOptions(**engine)))


def test_rank_tables_set_roles_and_instances(tables: Path, every_core: None) -> None:
    prefill, decode = (
        configuration("45", tensor_parallel_size=2).engine,
        configuration("67", "1,2", tensor_parallel_size=2).engine,
    )
    assert (prefill.role, decode.role) == ("prefill", "decode")
    router = configuration("host", "8088,8089")
    assert router.engine.role == "router"
    assert router.server.prefill_instances == ("http://10.0.0.1:8088",)
    assert router.server.decode_instances == ("http://10.0.0.1:8089",)
    assert prefill.cpu_binding == bind_devices(["4", "5"], ["4", "5", "6", "7"])
    assert configuration("45", tensor_parallel_size=2, cpu_binding="none").engine.cpu_binding == "none"


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two cores")
def test_devices_divide_the_cores(every_core: None) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first, second})
    here = ["12", "4", "5", "6"]
    assert bind_devices(["4", "5"], here) == f"{first}|{first}"
    assert bind_devices(["6", "12"], here) == f"{second}|{second}"
    assert bind_devices(["4", "5"], ["4", "5"]) == f"{first}|{second}"
    assert bind_devices(["7"], ["7"]) == f"{first},{second}"


Change = Callable[[dict[str, Any]], Any]


def local(name: str) -> dict[str, str]:
    return {"RANK_TABLE_FILE_PATH": f"local_ranktable_10.0.0.1_{name}.json"}


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        (local("45"), (), "tensor_parallel_size: 1 ranks need as many devices, but RANK_TABLE_FILE_PATH has 2 (4, 5)"),
        (
            {"GLOBAL_RANK_TABLE_FILE_PATH": ""},
            TWO,
            "global_rank_table: must be set, as RANK_TABLE_FILE_PATH",
        ),
        ({"RANK_TABLE_FILE_PATH": ""}, TWO, "rank_table: must be set, as GLOBAL_RANK_TABLE_FILE_PATH requires it"),
        ({"GLOBAL_RANK_TABLE_FILE_PATH": "no"}, TWO, "GLOBAL_RANK_TABLE_FILE_PATH: no cannot be read as a global"),
        ({"RANK_TABLE_FILE_PATH": "no"}, TWO, "RANK_TABLE_FILE_PATH: no cannot be read as a local rank table"),
        (local("45") | {"GLOBAL_RANK_TABLE_FILE_PATH": local("45")["RANK_TABLE_FILE_PATH"]}, TWO, "as a global rank"),
        (
            {"NODE_PORTS": "8088"},
            (),
            "NODE_PORTS: has 1 ports for 2 instances: 10.0.0.1 with the devices 4,5; 10.0.0.1",
        ),
        ({"NODE_PORTS": "8088,8089,8090"}, (), "NODE_PORTS: has 3 ports for 2 instances"),
        ({"NODE_PORTS": ""}, (), "node_ports: has 0 ports for 2 instances"),
        ({"NODE_PORTS": "8088,8088"}, (), "NODE_PORTS: has the port 8088 for two instances on 10.0.0.1"),
        ({"NODE_PORTS": "8088,http"}, (), "NODE_PORTS: 'http' is not a port"),
        ({"NODE_PORTS": "8088,0"}, (), "NODE_PORTS: '0' is not a port"),
        ({}, ("--port", "8089"), "port: is 8089, which NODE_PORTS assigns to an instance on this machine"),
        (
            {"GLOBAL_RANK_TABLE_FILE_PATH": "", "RANK_TABLE_FILE_PATH": ""},
            (),
            "NODE_PORTS: requires global_rank_table and rank_table",
        ),
    ],
)
def test_inconsistent_rank_tables_are_refused_with_one_line(
    tables: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], flags: tuple[str, ...], message: str
) -> None:
    defaults = {"GLOBAL_RANK_TABLE_FILE_PATH": "global_ranktable_10.0.0.1.json", "NODE_PORTS": "8088,8089"}
    for name, value in (defaults | local("host") | environment).items():
        monkeypatch.setenv(name, value)
    output = usage_error("--compat", "ascend-vllm", *flags)
    assert message in output and len(output.splitlines()) == 1


def _change_device(table: dict[str, Any]) -> None:
    table["server_list"][0]["device"][1]["device_id"] = "6"


def _change_address(table: dict[str, Any]) -> None:
    table["server_list"][0]["device"][1]["device_ip"] = "10.0.0.2"


def _change_group(table: dict[str, Any]) -> None:
    table["group_id"] = "1"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "45",
            _change_device,
            "RANK_TABLE_FILE_PATH: 10.0.0.1 with the devices 4,6 is not in GLOBAL_RANK_TABLE_FILE_PATH",
        ),
        ("67", _change_address, "which lists 10.0.0.1 with the devices 4,5; 10.0.0.1 with the devices 6,7"),
        ("45", _change_group, "cannot be read as a local rank table"),
    ],
)
def test_local_table_that_differs_from_global_table_is_refused(
    tables: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Change, message: str
) -> None:
    file = tables / f"local_ranktable_10.0.0.1_{name}.json"
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))
    monkeypatch.setenv("GLOBAL_RANK_TABLE_FILE_PATH", "global_ranktable_10.0.0.1.json")
    monkeypatch.setenv("RANK_TABLE_FILE_PATH", str(file))
    assert message in usage_error("--compat", "ascend-vllm", *TWO)


def test_global_table_with_duplicate_device_is_refused(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tables / "global_ranktable_10.0.0.1.json"
    file.write_text(file.read_text().replace('"device_id": "6"', '"device_id": "5"'))
    monkeypatch.setenv("GLOBAL_RANK_TABLE_FILE_PATH", str(file))
    monkeypatch.setenv("RANK_TABLE_FILE_PATH", "local_ranktable_10.0.0.1_45.json")
    output = usage_error("--compat", "ascend-vllm", *TWO)
    assert "GLOBAL_RANK_TABLE_FILE_PATH: device 5 of 10.0.0.1 is in two instances" in output
