"""The exporter's client against a real API server: pages, bookmarks, 410 after compaction, restarts, tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes.api import Gone, KubeApi
from tests.api_server.cluster import Cluster
from tests.deploy.chart import only, render
from tests.helpers.waiting import until
from tests.sources.kubernetes import objects
from tests.sources.kubernetes.test_api import watching

pytestmark = pytest.mark.live

PODS: Final = "/api/v1/pods"
ACCOUNT_KINDS: Final = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
ON_NODE: Final = {"fieldSelector": f"spec.nodeName={objects.NODE}"}


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> str:
    """The namespace and the name of the exporter's service account, installed with its rights."""
    cluster.namespace("kvpressure")
    documents = [item for item in render({}) if item["kind"] in ACCOUNT_KINDS]
    text = json.dumps({"kind": "List", "apiVersion": "v1", "items": documents})
    status, out, problem = cluster.kubectl("apply", "-f", "-", text=text)
    assert status == 0, out + problem
    name: str = only(documents, "ServiceAccount")["metadata"]["name"]
    return name


@pytest.fixture
def api(cluster: Cluster, account: str, tmp_path: Path) -> KubeApi:
    token = tmp_path / "token"
    token.write_text(cluster.token("kvpressure", account))
    return KubeApi(cluster.url, token, cluster.ca)


def fill(cluster: Cluster, node: str, count: int, **fields: Any) -> set[str]:
    """So many pods on a node."""
    for number in range(count):
        cluster.pod(objects.pod(f"{node}-{number}", node=node, **fields))
    return {f"{node}-{number}" for number in range(count)}


def test_a_node_of_many_pods_is_listed_in_full(cluster: Cluster, api: KubeApi) -> None:
    expected = fill(cluster, "many", 230)
    fill(cluster, "few", 2)
    cached = {"limit": "50", "resourceVersion": "0", "resourceVersionMatch": "NotOlderThan"}
    for first in (cached, {"limit": "50"}, {}):
        found, pages, metadata = [], 0, {}
        parameters: dict[str, str] = {**first}
        while pages == 0 or metadata.get("continue"):
            items = api.items(PODS, {"fieldSelector": "spec.nodeName=many", **parameters})
            try:
                while True:
                    found.append(next(items)["metadata"]["name"])
            except StopIteration as end:
                metadata = end.value
            pages += 1
            parameters = {"limit": "50", "continue": str(metadata.get("continue"))}
        print(first, pages, "pages")
        assert len(found) == len(expected)
        assert set(found) == expected
        assert metadata["resourceVersion"]


def test_changes_arrive_and_the_audit_log_shows_one_list(cluster: Cluster, api: KubeApi, account: str) -> None:
    user = f"system:serviceaccount:kvpressure:{account}"
    before = len(cluster.audited(user))
    with watching(api, fieldSelector="spec.nodeName=changing") as seen:
        until(lambda: seen.lists)
        cluster.pod(objects.pod("a", node="changing"))
        cluster.pod(objects.pod("b", node="changing"))
        until(lambda: seen.have("a", "b"))
        cluster.delete_pod("inference", "a")
        until(lambda: seen.have("b"))
        assert seen.watcher.error is None
        assert seen.watcher.errors == {}
    asked = [event["requestURI"] for event in cluster.audited(user)[before:]]
    lists = [uri for uri in asked if "watch=1" not in uri]
    assert len(lists) == 1
    assert "resourceVersion=0" in lists[0]
    assert "limit=50" in lists[0]


def test_bookmarks_come_and_carry_a_version(api: KubeApi) -> None:
    """A bookmark comes at the latest when the server ends the watch."""
    parameters = {"fieldSelector": "spec.nodeName=nobody", "resourceVersion": "0", "timeoutSeconds": "5"}
    found = list(api.watch(PODS, parameters, lambda _: None))
    assert {event["type"] for event in found} == {"BOOKMARK"}
    assert found[-1]["object"]["metadata"]["resourceVersion"].isdecimal()


def test_a_compacted_version_is_gone_and_the_view_recovers(cluster: Cluster, api: KubeApi) -> None:
    """The API server restarts over a compacted etcd, so that its cache does not know the old version either."""
    with watching(api, fieldSelector="spec.nodeName=compacted") as seen:
        cluster.pod(objects.pod("c-1", node="compacted"))
        until(lambda: seen.have("c-1"))
        old = str(cluster.pod(objects.pod("c-2", node="compacted"))["metadata"]["resourceVersion"])
        until(lambda: seen.have("c-1", "c-2"))
        cluster.stop("kube-apiserver")
        until(lambda: seen.watcher.error == "api_unreachable")
        cluster.start_api_server()
        fill(cluster, "elsewhere", 3)
        cluster.delete_pod("inference", "c-1")
        cluster.pod(objects.pod("c-3", node="compacted"))
        cluster.compact()
        until(lambda: seen.have("c-2", "c-3") and seen.watcher.error is None, 60)
        print("lists", seen.lists, "errors", seen.watcher.errors)
    parameters = {**ON_NODE, "resourceVersion": old, "timeoutSeconds": "5"}
    with pytest.raises(Gone):
        list(api.watch(PODS, parameters, lambda _: None))


def test_a_rotated_token_is_used_and_a_bad_one_named(cluster: Cluster, account: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(cluster.token("kvpressure", account))
    api = KubeApi(cluster.url, token, cluster.ca)
    assert list(api.items("/api/v1/namespaces/kvpressure/pods", {})) == []
    token.write_text("expired")
    with pytest.raises(SourceError) as refused:
        list(api.items(PODS, {}))
    assert refused.value.reason == "api_unauthorized"
    token.write_text(cluster.token("kvpressure", account))
    list(api.items(PODS, {"limit": "1"}))
    with pytest.raises(SourceError) as refused:
        list(api.items("/api/v1/secrets", {}))
    assert refused.value.reason == "api_forbidden"
    assert list(api.items("/api/v1/nodes", {"fieldSelector": "metadata.name=nobody"})) == []
