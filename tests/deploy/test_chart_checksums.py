"""Checksums in the pods' annotations: a changed option, secret or ConfigMap replaces the pods at an upgrade."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from manifests import of_kind, render
from test_chart import COMBINATIONS, DISAGGREGATED, KEYS, MOUNT, deployments


@contextmanager
def cluster(objects: dict[str, dict[str, Any]]) -> Iterator[str]:
    """URL of an API server with which Helm looks objects up.

    Args:
        objects: objects by path below the namespace ``default``, such as ``secrets/keys``.
    """
    kinds = {"secrets": "Secret", "configmaps": "ConfigMap"}
    resources = [{"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]} for name, kind in kinds.items()]
    answers: dict[str, dict[str, Any]] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources},
    }
    for path, object in objects.items():
        kind, _, name = path.partition("/")
        head = {"apiVersion": "v1", "kind": kinds[kind], "metadata": {"name": name, "namespace": "default"}}
        answers[f"/api/v1/namespaces/default/{path}"] = head | object

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            found = answers.get(self.path.partition("?")[0], missing)
            self.send_response(404 if found is missing else 200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("before", "after", "annotation"),
    [
        ({}, {"options": {"max_num_seqs": 8}}, "options"),
        (KEYS, {"apiKeys": {"values": ["one", "three"]}}, "secrets"),
        (KEYS, {"apiKeys": {"existingSecret": "keys"}}, "secrets"),
        ({}, {"huggingFace": {"existingSecret": "hub"}}, "secrets"),
        ({}, {"tls": {"existingSecret": "certificate"}}, "secrets"),
        ({}, COMBINATIONS["environment"], "secrets"),
        (
            DISAGGREGATED | {"clusterSecret": {"existingSecret": "a"}},
            DISAGGREGATED | {"clusterSecret": {"existingSecret": "b"}},
            "secrets",
        ),
        (MOUNT, {"extraVolumes": [{"name": "adapters", "configMap": {"name": "others"}}]}, "config-maps"),
    ],
)
def test_changed_secret_or_configuration_changes_its_checksum_only(
    before: dict[str, Any], after: dict[str, Any], annotation: str
) -> None:
    first, second = (deployments(values) for values in (before, after))
    for role in first:
        old, new = (each[role]["template"]["metadata"]["annotations"] for each in (first, second))
        assert {name for name in old | new if old.get(name) != new.get(name)} == {f"checksum/{annotation}"}


def test_generated_cluster_secret_is_the_same_in_all_objects() -> None:
    objects = render(DISAGGREGATED)
    (secret,) = of_kind(objects, "Secret")
    assert len(secret["data"]["cluster-secret"]) > 16
    checksums = {str(each["spec"]["template"]["metadata"]["annotations"]) for each in of_kind(objects, "Deployment")}
    assert len(checksums) == 1


def annotations(values: dict[str, Any], objects: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Annotations of the pods when the objects exist in the cluster."""
    with cluster(objects) as api_server:
        (deployment,) = of_kind(render(values, api_server=api_server), "Deployment")
    return dict(deployment["spec"]["template"]["metadata"]["annotations"])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("values", "name", "annotation"),
    [
        ({"apiKeys": {"existingSecret": "keys"}}, "secrets/keys", "secrets"),
        ({"huggingFace": {"existingSecret": "hub"}}, "secrets/hub", "secrets"),
        ({"tls": {"existingSecret": "certificate"}}, "secrets/certificate", "secrets"),
        (COMBINATIONS["environment"], "secrets/extra", "secrets"),
        (MOUNT, "configmaps/adapters", "config-maps"),
    ],
)
def test_changed_content_of_existing_object_changes_its_checksum_only(
    values: dict[str, Any], name: str, annotation: str
) -> None:
    first, second = (annotations(values, {name: {"data": {"x": data}}}) for data in ("YQ==", "Yg=="))
    assert {each for each in first if first[each] != second[each]} == {f"checksum/{annotation}"}
    assert first == annotations(values, {name: {"data": {"x": "YQ=="}}, "secrets/unrelated": {"data": {"x": "Yg=="}}})


def test_upgrade_keeps_generated_cluster_secret_and_its_checksum() -> None:
    objects = {"secrets/penstock-cluster": {"data": {"cluster-secret": "Zm9ydHktdHdv"}}}
    with cluster(objects) as api_server:
        first, second = (render(DISAGGREGATED, api_server=api_server) for _ in range(2))
    assert first == second
    (secret,) = of_kind(first, "Secret")
    assert secret["data"] == {"cluster-secret": "Zm9ydHktdHdv"}
