"""``discover``, and the workload of a pod, through kubectl and a real API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvpressure.cli import main
from kvpressure.toolbox.kubectl import Kubectl
from kvpressure.toolbox.workload import of_pod
from tests.api_server.cluster import Cluster
from tests.deploy.chart import ROOT, Json

pytestmark = pytest.mark.live

NAMESPACE: Final = "inference"
PODS: Final = ROOT / "tests" / "fixtures" / "pods"


@pytest.fixture(autouse=True)
def kubeconfig(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kubectl ask this API server."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))


def chat(kind: str = "Deployment", **pod: Any) -> Json:
    """A workload of one vLLM container."""
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.11.2",
        "args": ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-num-seqs", "256", "--port", "8000"],
        "ports": [{"containerPort": 8000, "name": "http"}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    spec: Json = {
        "selector": {"matchLabels": {"app": "chat"}},
        "template": {
            "metadata": {"labels": {"app": "chat"}},
            "spec": {"containers": [{"name": "proxy", "image": "envoy:v1"}, container], **pod},
        },
    }
    if kind == "StatefulSet":
        spec["serviceName"] = "chat"
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "chat", "namespace": NAMESPACE}, "spec": spec}


def apply(cluster: Cluster, *documents: Json) -> None:
    status, out, problem = cluster.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents))
    assert status == 0, out + problem


def read(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """Exit status and standard output of a command."""
    status = main(list(command))
    return status, capsys.readouterr().out


DROPPED: Final = ("resourceVersion", "managedFields", "finalizers", "generateName", "creationTimestamp", "uid")


def sent(document: Json, namespace: str) -> Json:
    """A pod of another project as one would create it: without what only its operator or the server may set."""
    metadata = {key: value for key, value in document["metadata"].items() if key not in DROPPED}
    metadata |= {"namespace": namespace, "ownerReferences": None}
    spec = {key: value for key, value in document["spec"].items() if not key.startswith("serviceAccount")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "node-1"} | spec}


@pytest.mark.parametrize(
    "path", sorted(PODS.glob("*/*.json")), ids=lambda path: path.relative_to(PODS).with_suffix("").as_posix()
)
def test_discover_says_the_same_of_a_namespace_and_of_a_file(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path, path: Path
) -> None:
    """What the API server adds to a pod (defaults, a token, tolerations) changes nothing that discovery finds."""
    namespace = cluster.namespace("discovered")
    document = json.loads(path.read_text())
    pod = sent(document, namespace)
    name = pod["metadata"]["name"]
    answer = cluster.create(pod)
    assert answer.status_code == 201, answer.text
    try:
        status = {key: value for key, value in document["status"].items() if key != "qosClass"}  # the server's own
        answer = cluster.ask(
            "PATCH",
            f"/api/v1/namespaces/{namespace}/pods/{name}/status",
            body={"status": status},
            content="application/strategic-merge-patch+json",
        )
        assert answer.status_code == 200, answer.text
        (tmp_path / "pod.json").write_text(json.dumps(pod | {"status": status}))
        of_file = json.loads(read(capsys, "discover", "-f", str(tmp_path / "pod.json"), "--format", "json")[1])
        of_cluster = json.loads(read(capsys, "discover", "-n", namespace, "--format", "json")[1])
        assert of_cluster == of_file
    finally:
        cluster.delete_pod(namespace, name)


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_workload_that_people_edit_is_found(cluster: Cluster, kind: str) -> None:
    cluster.namespace(NAMESPACE)
    apply(cluster, chat(kind))
    pod = sent({"metadata": {"name": "chat-x"}, "spec": chat(kind)["spec"]["template"]["spec"]}, NAMESPACE)
    uid = cluster.kubectl("get", kind, "chat", "-n", NAMESPACE, "-o", "jsonpath={.metadata.uid}")[1]
    owner = {"apiVersion": "apps/v1", "kind": kind, "name": "chat", "uid": uid, "controller": True}
    pod["metadata"]["ownerReferences"] = [owner]
    assert cluster.create(pod).status_code == 201
    try:
        assert of_pod(Kubectl(), NAMESPACE, "chat-x") == f"{kind.lower()}/chat"
    finally:
        cluster.delete_pod(NAMESPACE, "chat-x")
