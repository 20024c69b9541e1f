"""Objects that the Helm chart renders: combinations of values, validated against Kubernetes' schemas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import CHART, DEPLOY, documents, helm, of_kind, pods, render, validate

GPU = {"gpu": {"count": 1}}
DISAGGREGATED = {"prefillDecode": {"enabled": True, "decode": {"replicas": 2}}}
KEYS = {"apiKeys": {"values": ["one", "two"]}}
MOUNT = {
    "extraVolumes": [{"name": "adapters", "configMap": {"name": "adapters"}}],
    "extraVolumeMounts": [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}],
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "several_servers": {"replicas": 3, "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}}},
    "gpu": GPU | {"runtimeClassName": "nvidia", "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    "several_gpus": {
        "gpu": {"count": 8, "resource": "amd.com/gpu"},
        "replicas": 2,
        "options": {"tensor_parallel_size": 8},
    },
    "gpu_in_resources": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}},
    "claim": {"persistence": {"enabled": True, "storageClass": "fast"}},
    "shared_claim": {"persistence": {"enabled": True, "accessModes": ["ReadWriteMany"]}, "replicas": 2},
    "existing_claims": {
        "persistence": {"enabled": True, "existingClaim": "cache"},
        "models": {"existingClaim": "checkpoints"},
        "options": {"model": "/models/qwen"},
    },
    "keys": KEYS | {"huggingFace": {"existingSecret": "hub"}},
    "existing_secrets": DISAGGREGATED
    | {"apiKeys": {"existingSecret": "keys"}, "clusterSecret": {"existingSecret": "cluster"}},
    "tls": {"tls": {"existingSecret": "certificate"}, "serviceMonitor": {"enabled": True}},
    "tls_disaggregated": DISAGGREGATED | {"tls": {"existingSecret": "certificate"}, "service": {"grpcPort": 8001}},
    "grpc": {"service": {"grpcPort": 8001}, "options": {"model": "/models/qwen", "max_num_seqs": 64}},
    "ingress": {"ingress": {"enabled": True, "className": "nginx", "hosts": ["llm.example", "api.example"]}},
    "ingress_tls": {"ingress": {"enabled": True, "tls": [{"secretName": "site", "hosts": ["llm.example"]}]}},
    "http_route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}]}},
    "autoscaling": {"autoscaling": {"enabled": True}, "serviceMonitor": {"enabled": True, "labels": {"a": "b"}}},
    "keda": DISAGGREGATED | GPU | {"keda": {"enabled": True}},
    "download": {"modelDownload": {"enabled": True}, "options": {"model": "org/name"}} | KEYS,
    "init_containers": MOUNT | {"initContainers": [{"name": "wait", "image": "busybox", "command": ["true"]}]},
    "names": {"fullnameOverride": "llm", "nameOverride": "server", "serviceAccount": {"create": True}} | DISAGGREGATED,
    "account": {"serviceAccount": {"name": "reader", "automount": True}, "imagePullSecrets": [{"name": "registry"}]},
    "pods": {
        "podLabels": {"team": "search"},
        "podAnnotations": {"note": "x"},
        "priorityClassName": "high",
        "nodeSelector": {"zone": "a"},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "image": {"digest": f"sha256:{'0' * 64}"},
    },
    "environment": {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "extra", "key": "x"}}}]},
}
"""Values by name of the combination."""
GIVEN = {"hub", "keys", "cluster", "certificate", "extra", "adapters", "cache", "checkpoints"}
"""Secrets, ConfigMaps and claims that the combinations name and the chart does not create."""


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination_renders_valid_and_consistent_objects(name: str) -> None:
    objects = render(COMBINATIONS[name])
    validate(objects)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    created = {name for kind, name in names if kind in ("Secret", "ConfigMap", "PersistentVolumeClaim")}
    for pod in pods(objects):
        used = re.findall(r"'(?:secretName|claimName)': '([\w-]+)'", str(pod))
        used += re.findall(r"'(?:secretKeyRef|configMap)': \{[^}]*'name': '([\w-]+)'", str(pod))
        assert used and set(used) <= created | GIVEN
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
    templates = [each["spec"]["template"] for each in of_kind(objects, "Deployment")]
    for service in of_kind(objects, "Service"):
        selected = [
            each for each in templates if service["spec"]["selector"].items() <= each["metadata"]["labels"].items()
        ]
        assert selected
        for template in selected:
            ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    deployments = {name for kind, name in names if kind == "Deployment"}
    for scaler in (*of_kind(objects, "HorizontalPodAutoscaler"), *of_kind(objects, "ScaledObject")):
        assert scaler["spec"]["scaleTargetRef"]["name"] in deployments


def deployments(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Specifications of the Deployments, by role."""
    objects = of_kind(render(values), "Deployment")
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"] for each in objects}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        (GPU, "Recreate"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "Recreate"),
        (GPU | {"replicas": 2}, "RollingUpdate"),
        (GPU | {"autoscaling": {"enabled": True}}, "RollingUpdate"),
        ({"persistence": {"enabled": True}}, "Recreate"),
        ({"persistence": {"enabled": True, "accessModes": ["ReadWriteMany"]}}, None),
        (GPU | {"strategy": {"type": "RollingUpdate"}}, "RollingUpdate"),
    ],
)
def test_strategy_needs_no_second_gpu_or_claim(values: dict[str, Any], expected: str | None) -> None:
    strategy = deployments(values)["mixed"].get("strategy", {})
    assert strategy.get("type") == expected
    if expected == "Recreate":
        assert strategy["rollingUpdate"] is None  # otherwise Kubernetes refuses the upgrade
    if expected == "RollingUpdate" and "strategy" not in values:
        assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_tls_secret_makes_probes_registrations_and_scrapes_https() -> None:
    objects = render(COMBINATIONS["tls_disaggregated"] | {"serviceMonitor": {"enabled": True}})
    for pod in pods(objects):
        (container,) = pod["containers"]
        probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert {probe["scheme"] for probe in probes} == {"HTTPS"}
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "tls")
        files = [part for part in container["args"] if part.startswith("--ssl-")]
        folder = mount["mountPath"]
        assert files == [f"--ssl-certfile={folder}/tls.crt", f"--ssl-keyfile={folder}/tls.key"]
        routers = [part for part in container["args"] if part.startswith("--router-address")]
        assert all(part == "--router-address=https://penstock-router:8000" for part in routers)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["scheme"] == "https"
    plain = deployments({})["mixed"]["template"]["spec"]["containers"][0]
    assert plain["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    assert not any("ssl" in part for part in plain["args"])


def test_grpc_port_is_opened_where_clients_are_served() -> None:
    for values, front in ((COMBINATIONS["grpc"], "mixed"), (COMBINATIONS["tls_disaggregated"], "router")):
        for role, spec in deployments(values).items():
            (container,) = spec["template"]["spec"]["containers"]
            assert ("--grpc-port=8001" in container["args"]) == (role == front)
        service = next(each for each in render(values) if each["kind"] == "Service")
        assert {"name": "grpc", "port": 8001, "targetPort": "grpc"} in service["spec"]["ports"]


def test_gpus_select_image_and_limits_of_containers_with_a_model() -> None:
    for role, spec in deployments(COMBINATIONS["keda"] | {"runtimeClassName": "nvidia"}).items():
        pod = spec["template"]["spec"]
        limits = pod["containers"][0]["resources"].get("limits", {})
        assert limits.get("nvidia.com/gpu") == (None if role == "router" else 1)
        assert pod.get("runtimeClassName") == (None if role == "router" else "nvidia")
        assert pod["containers"][0]["image"] == "penstock:cuda"
    for name, tag in (("defaults", "cpu"), ("gpu_in_resources", "cuda"), ("several_gpus", "cuda")):
        assert next(pods(render(COMBINATIONS[name])))["containers"][0]["image"] == f"penstock:{tag}"
    assert next(pods(render(COMBINATIONS["pods"])))["containers"][0]["image"] == f"penstock@sha256:{'0' * 64}"


def test_download_container_has_the_servers_cache_options_and_token() -> None:
    values = COMBINATIONS["download"] | {"huggingFace": {"existingSecret": "hub"}}
    (pod,) = pods(render(values))
    (download,), (server,) = pod["initContainers"], pod["containers"]
    assert download["args"] == ["download", "org/name", "--config=/etc/penstock/penstock.yaml"]
    assert (download["volumeMounts"], download["env"]) == (server["volumeMounts"], server["env"])
    for model in ("", "/models/qwen"):
        with pytest.raises(Exception, match="modelDownload needs a model that can be downloaded"):
            render({"modelDownload": {"enabled": True}, "options": {"model": model}})


def test_init_containers_of_values_run_first() -> None:
    values = COMBINATIONS["init_containers"] | DISAGGREGATED | {"options": {"model": "org/name"}}
    values |= {"modelDownload": {"enabled": True}}
    for role, spec in deployments(values).items():
        names = [each["name"] for each in spec["template"]["spec"]["initContainers"]]
        assert names == ["wait", "cluster-secret", *(["download"] if role != "router" else [])]


def test_ingress_and_route_lead_to_the_service() -> None:
    (ingress,) = of_kind(render(COMBINATIONS["ingress"]), "Ingress")
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["llm.example", "api.example"]
    backends = [rule["http"]["paths"][0]["backend"]["service"] for rule in ingress["spec"]["rules"]]
    assert backends == [{"name": "penstock", "port": {"name": "http"}}] * 2
    (route,) = of_kind(render(COMBINATIONS["http_route"]), "HTTPRoute")
    assert route["spec"]["parentRefs"] == [{"name": "gateway", "namespace": "infra"}]
    assert route["spec"]["rules"] == [{"backendRefs": [{"name": "penstock", "port": 8000}]}]


def test_keda_scales_each_role_by_its_pods() -> None:
    objects = render(COMBINATIONS["keda"], namespace="llm")
    for scaled in of_kind(objects, "ScaledObject"):
        name = scaled["spec"]["scaleTargetRef"]["name"]
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        metric, namespace, pod = re.fullmatch(r'sum\(([\w:]+)\{namespace="(\w+)",pod=~"(.*)"\}\)', query).groups()  # type: ignore[union-attr]
        assert namespace == "llm" and re.fullmatch(pod, f"{name}-7d9f8b6c5-x2x4z")
        assert metric in (DEPLOY / "grafana/penstock.json").read_text()  # test_dashboards.py checks its metric names
    assert len(of_kind(objects, "ScaledObject")) == 2
    replicas = {role: spec.get("replicas") for role, spec in deployments(COMBINATIONS["keda"]).items()}
    assert replicas == {"prefill": None, "decode": None, "router": 1}


def test_names_follow_overrides() -> None:
    objects = render(COMBINATIONS["names"])
    assert all(each["metadata"]["name"].split("-")[0] == "llm" for each in objects)
    assert {each["metadata"]["labels"]["app.kubernetes.io/name"] for each in objects} == {"server"}
    assert {pod["serviceAccountName"] for pod in pods(objects)} == {"llm"}
    assert render({}, name="prod")[0]["metadata"]["name"] == "prod-penstock"
    long = render(DISAGGREGATED, name="a" * 53)
    assert max(len(each["metadata"]["name"]) for each in long) <= 63


def test_chart_passes_helm_lint() -> None:
    report = helm().lint(str(CHART), strict=True, kube_version="v1.32.0")
    assert not [message for message in report["messages"] if message["severity"] > 1], report


def test_autoscaler_metric_exists() -> None:
    (rule,) = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text())["rules"]["custom"]
    assert yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]["metric"] == rule["name"]["as"]
    dashboard = (DEPLOY / "grafana/penstock.json").read_text()  # test_dashboards.py checks its metric names
    assert rule["seriesQuery"].partition("{")[0] in dashboard


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_match_kubernetes_schemas(path: Path) -> None:
    validate(documents(path.read_text()))
