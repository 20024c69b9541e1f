"""The Helm chart as tests use it: rendering, validation, and linters of deployment files."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/penstock"
CUSTOM = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io")
"""API groups of custom resources, whose schemas Kubernetes does not have."""


def tool(package: str, command: str) -> str:
    """Path of a command; skip the test if it is not installed."""
    local = Path(sys.executable).with_name(command)
    found = str(local) if local.exists() else shutil.which(command)
    if found is None:
        pytest.skip(f"needs {command} (pip install {package})")
    return found


def lint(package: str, command: str, *arguments: str | Path) -> None:
    """Run a linter; skip the test if it is not installed."""
    result = subprocess.run([tool(package, command), *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def helm() -> Any:
    """Helm's engine; skip the test if it is not installed."""
    try:
        return importlib.import_module("helm_python")
    except ImportError:
        pytest.skip("needs Helm's engine (pip install helm-python-sdk)")


def render(
    values: dict[str, Any], name: str = "penstock", namespace: str = "default", api_server: str = ""
) -> list[dict[str, Any]]:
    """Objects that Helm renders from the chart; the values are validated against its schema. With ``api_server``,
    existing objects are read from there, as in an upgrade."""
    with helm().Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        if api_server:
            with helm().Config(kube_apiserver=api_server, namespace=namespace) as config:
                files = config.render(chart, values, name=name, namespace=namespace, is_upgrade=True)
        else:
            files = chart.render(values, name=name, namespace=namespace)
    return [document for path, text in files.items() if path.endswith(".yaml") for document in documents(text)]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment"))


def validate(objects: list[dict[str, Any]]) -> None:
    """Validate objects strictly against Kubernetes' schemas, except custom resources."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    for each in objects:
        if not each["apiVersion"].startswith(CUSTOM):
            kubernetes.validate(each, "1.32", strict=True)
