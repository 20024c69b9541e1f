"""Prometheus rules and the Grafana dashboard, checked with a Prometheus that scrapes a server, and Grafana's types."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from repository import ROOT
from serving import Served, free_ports

PROMETHEUS = shutil.which("prometheus")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
VARIABLES = {"$model": ".*", "$job": ".*", "$__rate_interval": "1m"}
WITHOUT_SAMPLES = ("spec_decode", "kv_transfer", "storage_refusals")
"""Parts of the names of metrics that have no samples, as the server does not use their features."""


class NotReadyError(Exception):
    """Prometheus does not answer queries yet."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """API URL of a Prometheus that has scraped a server a few times, with requests in between."""
    if PROMETHEUS is None:
        pytest.skip("needs Prometheus (Debian: apt install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = free_ports(1)
    with Served("--storage-dir", str(folder / "stored")) as server:
        form: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "user_data"}}
        httpx.post(f"{server.url}/files", **form).raise_for_status()
        httpx.post(f"{server.url}/conversations", json={}).raise_for_status()
        httpx.post(f"{server.url}/responses", json={"input": "a", "max_output_tokens": 1}).raise_for_status()
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [httpx.URL(server.root).netloc.decode()]
        shutil.copy(ROOT / "deploy/prometheus/alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command = [PROMETHEUS, *flags, f"--web.listen-address=127.0.0.1:{port}"]
        with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
            try:
                address = f"http://127.0.0.1:{port}/api/v1"
                deadline = time.monotonic() + 60
                while not scrapes(address, "count_over_time(up[1m])", 6):
                    assert time.monotonic() < deadline, (folder / "log").read_text()
                    httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 4}, timeout=30)
                yield address
            finally:
                process.terminate()
                process.wait()


def scrapes(address: str, expression: str, count: int) -> bool:
    try:
        found = query(address, expression)
    except (httpx.TransportError, NotReadyError):
        return False
    return bool(found) and float(found[0]["value"][1]) >= count


def query(address: str, expression: str) -> list[Any]:
    response = httpx.get(f"{address}/query", params={"query": expression}, timeout=30)
    if response.status_code == 503:
        raise NotReadyError
    assert response.status_code == 200, (expression, response.text)
    result: list[Any] = response.json()["data"]["result"]
    return result


def in_schema(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Parse a dashboard with Grafana's types, and encode it again. Unknown fields, also of panel options, are dropped;
    values are not checked."""
    types = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    parsed = types.Dashboard.from_json(copy.deepcopy(dashboard))
    result: dict[str, Any] = json.loads(encoder.JSONEncoder().encode(parsed))
    return result


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Paths of values of ``before`` that are missing or different in ``after``."""
    if isinstance(before, dict):
        inner = [(key, value, after.get(key) if isinstance(after, dict) else None) for key, value in before.items()]
        return [found for key, value, other in inner for found in lost(value, other, f"{path}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [found for i, pair in pairs for found in lost(*pair, f"{path}[{i}]")]
    return [] if before == after else [path]


def test_dashboard_matches_grafana_schema() -> None:
    assert lost(DASHBOARD, in_schema(DASHBOARD)) == []
    wrong = copy.deepcopy(DASHBOARD)
    wrong["panels"][1]["options"]["colour"] = "value"
    wrong["panels"][8]["fieldConfig"]["defaults"].setdefault("custom", {})["lineWidht"] = 2
    assert lost(wrong, in_schema(wrong)) == [
        ".panels[1].options.colour",
        ".panels[8].fieldConfig.defaults.custom.lineWidht",
    ]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_panel_has_data(prometheus: str) -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 20
    for expression in expressions:
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        found = query(prometheus, expression)
        assert found or any(part in expression for part in (*WITHOUT_SAMPLES, "request_failures")), expression


def test_dashboard_and_alerts_use_existing_metrics(prometheus: str) -> None:
    names = set(httpx.get(f"{prometheus}/label/__name__/values").json()["data"])
    texts = json.dumps(DASHBOARD) + (ROOT / "deploy/prometheus/alerts.yml").read_text()
    used = set(re.findall(r"penstock:\w+", texts))
    missing = {name for name in used - names if not any(part in name for part in WITHOUT_SAMPLES)}
    assert missing <= {"penstock:request_failures_total"}  # absent, as no request has failed


def test_alert_rules_load_and_do_not_fire(prometheus: str) -> None:
    (group,) = httpx.get(f"{prometheus}/rules").json()["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert {rule["state"] for rule in group["rules"]} == {"inactive"}


def test_vllm_metric_names_have_data(prometheus: str) -> None:
    """The metrics are those that routers and dashboards for vLLM use."""
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert query(prometheus, f"vllm:{name}")
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert query(prometheus, f"histogram_quantile(0.9, rate(vllm:{name}_bucket[1m]))")
