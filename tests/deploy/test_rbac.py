"""The rights of the service account: what the sources ask for against a recording API server, no more and no less."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kvpressure.settings.settings import Settings
from kvpressure.sources.kubernetes.node import NodeSource
from kvpressure.sources.kubernetes.pods import PodsSource
from tests.deploy.chart import CI_VALUES, Json, of_kind, only, render
from tests.deploy.test_daemonset import load
from tests.helpers.waiting import until
from tests.sources.kubernetes.apiserver import FakeApi
from tests.sources.kubernetes.objects import NODE, node, pod

Right = tuple[str, str, str]
"""Namespace ("" = the whole cluster), resource, verb."""


CASES: Final = {
    **CI_VALUES,
    "node only": {"sources": {"pods": False, "procfs": False, "cgroup": False, "logs": False}},
    "two namespaces": {"namespaces": ["chat", "batch"]},
}
_PATH: Final = re.compile(r"/api/v1(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?")


def granted(documents: list[Json]) -> set[Right]:
    """What the bindings of the service account give."""
    account = only(documents, "ServiceAccount")["metadata"]
    roles = {
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]): item["rules"]
        for item in documents
        if item["kind"] in ("Role", "ClusterRole")
    }
    found: set[Right] = set()
    bindings = [item for item in documents if item["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    for binding in bindings:
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        ]
        namespace = binding["metadata"].get("namespace")
        for rule in roles[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]:
            if rule["apiGroups"] == ["security.openshift.io"]:  # test_admission looks at it
                continue
            assert rule["apiGroups"] == [""]
            assert set(rule) == {"apiGroups", "resources", "verbs"}
            found |= {(namespace or "", resource, verb) for resource in rule["resources"] for verb in rule["verbs"]}
    assert len(bindings) == len(roles)
    return found


def asked(api: FakeApi, chosen: Settings) -> set[Right]:
    """What the sources that are on ask the API server for, until they know everything and watch it."""
    on = {name for name, chosen_one in chosen.collectors.items() if chosen_one.enabled}
    sources = [*([NodeSource(chosen)] if "node" in on else []), *([PodsSource(chosen)] if "pods" in on else [])]
    collections = ("node" in on) + ("pods" in on) * max(1, len(chosen.kube_namespaces))
    for source in sources:
        source.read()
    until(lambda: sum(query.get("watch") == "1" for _, query in api.requests) >= collections)
    for source in sources:
        source.close()
    rights = set()
    for path, query in list(api.requests):
        match = _PATH.fullmatch(path)
        assert match is not None, path
        verb = "get" if match["name"] else "watch" if query.get("watch") == "1" else "list"
        rights.add((match["namespace"] or "", match["resource"], verb))
    return rights


@pytest.mark.slow
@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_rights_are_what_the_sources_ask_for(values: Json, tmp_path: Path) -> None:
    documents = render(values)
    for daemonset in of_kind(documents, "DaemonSet"):
        vendor = daemonset["metadata"]["labels"]["app.kubernetes.io/component"]
        with FakeApi() as api:
            api.apply(node(Ready="True"))
            api.apply(pod("a"))
            config = {"config": {"kube.api-url": api.url}, "thresholds": values.get("thresholds", {})}
            chosen = load(render({**values, **config}), vendor, tmp_path)
            assert granted(documents) == asked(api, replace(chosen, node_name=NODE))


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_a_token_only_where_the_api_server_is_asked(values: Json) -> None:
    documents = render(values)
    assert only(documents, "ServiceAccount")["automountServiceAccountToken"] is False
    for daemonset in of_kind(documents, "DaemonSet"):
        mounted = daemonset["spec"]["template"]["spec"]["automountServiceAccountToken"]
        assert mounted is bool(granted(documents))


def test_the_namespaced_variant_has_no_right_in_the_cluster() -> None:
    documents = render(CASES["namespaced-values"])
    assert granted(documents) == {("inference", "pods", "list"), ("inference", "pods", "watch")}
    assert not of_kind(documents, "ClusterRole") + of_kind(documents, "ClusterRoleBinding")
