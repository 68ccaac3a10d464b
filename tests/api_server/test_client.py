"""The exporter's client against a real API server: pages, bookmarks, 410 after compaction, restarts, tokens, memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes.api import Gone, KubeApi, Watcher
from tests.api_server.cluster import Cluster
from tests.deploy.chart import Json, only, render
from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import Gpu, build
from tests.sources.kubernetes import objects
from tests.sources.kubernetes.node import SOURCES, Node, uuid
from tests.sources.kubernetes.test_node_e2e import rich

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
    """The exporter's client with the token of its account."""
    token = tmp_path / "token"
    token.write_text(cluster.token("kvpressure", account))
    return KubeApi(cluster.url, token, cluster.ca)


class Seen:
    """What a watcher reports."""

    def __init__(self, api: KubeApi, node: str = objects.NODE) -> None:
        self.pods: set[str] = set()
        self.lists = 0
        self.watcher = Watcher(
            api, PODS, {"fieldSelector": f"spec.nodeName={node}"}, self._replace, self._change, (0.1, 2.0)
        )

    def __enter__(self) -> Seen:
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watcher.close()

    def _replace(self, items: Iterator[Json]) -> None:
        self.pods = {item["metadata"]["name"] for item in items}
        self.lists += 1

    def _change(self, kind: str, item: Json) -> None:
        if kind == "DELETED":
            self.pods.discard(item["metadata"]["name"])
        else:
            self.pods.add(item["metadata"]["name"])


def fill(cluster: Cluster, node: str, count: int, **fields: Any) -> set[str]:
    """So many pods on a node."""
    for number in range(count):
        cluster.pod(objects.pod(f"{node}-{number}", node=node, **fields))
    return {f"{node}-{number}" for number in range(count)}


def test_a_node_of_many_pods_is_listed_in_full(cluster: Cluster, api: KubeApi) -> None:
    expected = fill(cluster, "many", 230)
    fill(cluster, "few", 2)
    for first in ({"limit": "50", "resourceVersion": "0"}, {"limit": "50"}, {}):
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
    with Seen(api, "changing") as seen:
        until(lambda: seen.lists)
        cluster.pod(objects.pod("a", node="changing"))
        cluster.pod(objects.pod("b", node="changing"))
        until(lambda: seen.pods == {"a", "b"})
        cluster.delete_pod("inference", "a")
        until(lambda: seen.pods == {"b"})
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
    with Seen(api, "compacted") as seen:
        cluster.pod(objects.pod("c-1", node="compacted"))
        until(lambda: seen.pods == {"c-1"})
        old = str(cluster.pod(objects.pod("c-2", node="compacted"))["metadata"]["resourceVersion"])
        until(lambda: seen.pods == {"c-1", "c-2"})
        cluster.stop("kube-apiserver")
        until(lambda: seen.watcher.error == "api_unreachable")
        cluster.start_api_server()
        fill(cluster, "elsewhere", 3)
        cluster.delete_pod("inference", "c-1")
        cluster.pod(objects.pod("c-3", node="compacted"))
        cluster.compact()
        until(lambda: seen.pods == {"c-2", "c-3"} and seen.watcher.error is None, 60)
        print("lists", seen.lists, "errors", seen.watcher.errors)
    parameters = {**ON_NODE, "resourceVersion": old, "timeoutSeconds": "5"}
    with pytest.raises(Gone):
        list(api.watch(PODS, parameters, lambda _: None))


def test_a_page_after_a_compaction_is_of_the_same_list_or_gone(cluster: Cluster, api: KubeApi) -> None:
    """Newer servers keep snapshots of their cache, older ones have forgotten the list."""
    expected = fill(cluster, "paged", 4)
    found, metadata = [], {}
    items = api.items(PODS, {"fieldSelector": "spec.nodeName=paged", "limit": "2"})
    try:
        while True:
            found.append(next(items)["metadata"]["name"])
    except StopIteration as end:
        metadata = end.value
    assert len(found) == 2
    cluster.pod(objects.pod("paged-new", node="paged"))
    cluster.compact()
    more = {"fieldSelector": "spec.nodeName=paged", "limit": "2", "continue": str(metadata["continue"])}
    try:
        found += [item["metadata"]["name"] for item in api.items(PODS, more)]
    except Gone:
        return
    assert set(found) == expected


def test_a_rotated_token_is_used_and_a_bad_one_named(cluster: Cluster, account: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(cluster.token("kvpressure", account))
    api = KubeApi(cluster.url, token, cluster.ca)
    assert api.get("/api/v1/namespaces/kvpressure/pods")["kind"] == "PodList"
    token.write_text("expired")
    with pytest.raises(SourceError) as refused:
        api.get(PODS)
    assert refused.value.reason == "api_unauthorized"
    token.write_text(cluster.token("kvpressure", account))
    assert api.get(PODS, {"limit": "1"})["kind"] == "PodList"
    with pytest.raises(SourceError) as refused:
        api.get("/api/v1/secrets")
    assert refused.value.reason == "api_forbidden"
    with pytest.raises(SourceError) as refused:
        api.get("/api/v1/nodes/nobody")
    assert refused.value.reason == "api_not_found"


# --- the whole exporter
# ---------------------------------------------------------------------------------------------------


class RealApi:
    """The API server in place of the one that the tests of a node bring."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.url = cluster.url
        self.tokens: set[str] = set()

    def __enter__(self) -> RealApi:
        return self

    def __exit__(self, *_: object) -> None:
        """The cluster goes on."""

    def apply(self, document: Json) -> Json:
        """Create a pod or a node with its status."""
        if document["kind"] == "Node":
            made = self._cluster.create(document)
            assert made.status_code in (201, 409), made.text
            path = f"/api/v1/nodes/{document['metadata']['name']}/status"
            body = {"status": document["status"]}
            answer = self._cluster.ask("PATCH", path, body=body, content="application/strategic-merge-patch+json")
            assert answer.status_code == 200, answer.text
            return dict(answer.json())
        return self._cluster.pod(document)

    def delete(self, document: Json) -> None:
        """Delete a pod."""
        self._cluster.delete_pod(document["metadata"]["namespace"], document["metadata"]["name"])


class RealNode(Node):
    """A node whose API server is real. What the API server decides (uid) is what the node goes by."""

    def __init__(self, where: Path, library: Path, cluster: Cluster, token: str, *arguments: str) -> None:
        super().__init__(where, library, "--kube.ca-file", str(cluster.ca), *arguments)
        self.api = RealApi(cluster)  # type: ignore[assignment]  # answers like the stub
        self._token = token

    def __enter__(self) -> RealNode:
        super().__enter__()
        (self.where / "token").write_text(self._token)
        return self

    def document(self, name: str, **fields: Any) -> Json:
        """The pod as the API server has made it, so that the node's files bear the uid that it chose."""
        return self.api.apply(super().document(name, **fields))


@pytest.fixture(scope="module")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.mark.parametrize("kilobytes", [76, 240])
def test_a_full_node_of_large_pods_stays_in_its_memory(
    cluster: Cluster, account: str, tmp_path: Path, nvml_library: Path, kilobytes: int
) -> None:
    with RealNode(tmp_path, nvml_library, cluster, cluster.token("kvpressure", account)) as node:
        node.gpus = [Gpu() for _ in range(8)]
        node.write_world()
        for number in range(8):
            node.add(f"vllm-{number}", [uuid(number)])
        for number in range(242):
            document = rich(number, kilobytes * 1000)
            document["metadata"]["name"] += f"-of-{kilobytes}"
            missing = kilobytes * 1000 // 2
            document["metadata"]["annotations"]["managed"] = "x" * missing
            cluster.pod(document)
        try:
            node.start()
            until(lambda: node.labels("engine_up", "pod") == {f"vllm-{number}" for number in range(8)}, 180)
            until(lambda: all(node.value("source_up", source=name) == 1 for name in SOURCES), 60)
            time.sleep(5)
            size = len(cluster.ask("GET", f"{PODS}?fieldSelector=spec.nodeName%3D{objects.NODE}").content)
            now, peak = node.memory_bytes() / 2**20, node.peak_bytes() / 2**20
            print(f"250 pods of {kilobytes} KB: list {size / 1e6:.0f} MB, memory {now:.1f} MiB, peak {peak:.1f} MiB")
            assert node.peak_bytes() < 64 * 2**20
            assert node.samples("container_restarts_total")
            assert node.value("node_condition", condition="Ready") == 1
        finally:
            for number in range(242):
                cluster.delete_pod(f"team-{number % 7}", f"other-{number}-of-{kilobytes}")
            for name in list(node.pods):
                cluster.delete_pod("inference", name)
