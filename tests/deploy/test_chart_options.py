"""Values of the Helm chart: validated against its schema, whose options are those of the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from manifests import CHART, helm, of_kind, render
from repository import ROOT

from penstock.config.settings import settings
from penstock.config.sources import convert_setting, read
from penstock.core.errors import PenstockError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"options": {"max_num_seq": 64}}, "'max_num_seq' not allowed"),
        ({"options": {"port": 9000}}, "'port' not allowed"),
        ({"options": {"api_key": "secret"}}, "'api_key' not allowed"),
        ({"options": {"compat": "vllm", "api-key": "secret"}}, "'api-key'"),
        ({"options": {"max_num_seqs": 0}}, "/options/max_num_seqs"),
        ({"options": {"dtype": "float8"}}, "/options/dtype"),
        ({"replica": 2}, "'replica' not allowed"),
        ({"apiKeys": {"values": ["a,b"]}}, "/apiKeys/values/0"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"drainTimeout": 60}, "terminationGracePeriod must be more than"),
        ({"keda": {"enabled": True}, "autoscaling": {"enabled": True}}, "exclude each other"),
        ({"httpRoute": {"enabled": True}}, "parentRefs is empty"),
    ],
)
def test_wrong_value_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        render(values)


def test_options_of_other_systems_are_accepted_with_compat() -> None:
    options = {"compat": "vllm", "swap-space": 4, "model": "org/name"}
    (config,) = of_kind(render({"options": options}), "ConfigMap")
    assert yaml.safe_load(config["data"]["penstock.yaml"]) == options


def test_values_accepted_by_schema_are_accepted_by_server() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    properties = schema["$defs"]["options"]["else"]["properties"]
    values: list[Any] = [0, 1, -1, -2, 1.5, 0.5, 10**6, 2**40, True, "text", "", {"a": 1}, ["a", "b"], [1, 8], "1,8"]
    accepted = 0
    for name, option in properties.items():
        setting = settings()[name]
        validator = jsonschema.Draft202012Validator(option)
        assert validator.is_valid(None)
        natural = list(setting.default) if setting.kind is tuple else setting.default
        assert validator.is_valid(natural), name
        for value in (*values, *setting.choices):
            if not validator.is_valid(value) or (setting.kind is tuple and value in ("", "text", ["a", "b"])):
                continue
            accepted += 1
            try:
                convert_setting(setting, value, "values")
            except PenstockError as error:
                pytest.fail(f"{name}: {value!r} is in the schema, and refused by the server: {error}")
    assert accepted > 2 * len(properties)


def test_server_reads_rendered_options(tmp_path: Path) -> None:
    options = {"model": "/models/a b", "kv_cache_memory_bytes": 2**40, "trace_sampling_ratio": 0.25, "web": False}
    options |= {
        "served_model_name": ["a", "7"],
        "speculative_config": {"method": "ngram"},
        "chat_template": "{{ x }}\n: #",
    }
    (config,) = of_kind(render({"options": options}), "ConfigMap")
    (tmp_path / "penstock.yaml").write_text(config["data"]["penstock.yaml"])
    found = read({}, tmp_path / "penstock.yaml", environment={}).configuration
    sections = (found.engine, found.model, found.server, found.log)
    values = {name: getattr(part, name) for part in sections for name in options if hasattr(part, name)}
    assert json.loads(values.pop("speculative_config")) == options.pop("speculative_config")
    assert values == options | {"served_model_name": ("a", "7")}


@pytest.mark.slow
def test_download_command_accepts_options_of_the_server(tmp_path: Path) -> None:
    """The init container passes the ConfigMap of the server to ``penstock download``."""
    (config,) = of_kind(render({"options": {"max_num_seqs": 8, "web": False, "model": "x"}}), "ConfigMap")
    (tmp_path / "penstock.yaml").write_text(config["data"]["penstock.yaml"])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config_flag = f"--config={tmp_path}/penstock.yaml"
    command = [sys.executable, "-m", "penstock.cli.main", "download", model.as_uri(), config_flag]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_generated_files_are_current() -> None:
    helm()
    result = subprocess.run([sys.executable, "scripts/chart.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_value_is_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert list(schema["properties"]) == ["global", *values]
    used = set(
        re.findall(r"(?:\.Values|\$values)\.(\w+)", " ".join(path.read_text() for path in CHART.rglob("templates/*")))
    )
    loops = {"nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"}
    assert used | loops == set(values)
