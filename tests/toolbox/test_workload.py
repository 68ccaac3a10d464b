"""What made the pods of an engine, straight from the cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.command import Capsys, run
from tests.toolbox.conftest import FakeKubectl
from tests.toolbox.test_cluster import PAGES, pages, pod

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("clock")]

FORBIDDEN = Exception('Error from server (Forbidden): "chat" is forbidden')


def owned(kind: str, group: str, name: str, owners: int = 1) -> dict[str, Any]:
    references = [{"kind": kind, "name": name, "apiVersion": group, "controller": True}]
    selector = {"matchLabels": {"app": "vllm", "tier": "a"}}
    return {"metadata": {"ownerReferences": references[:owners]}, "spec": {"selector": selector}}


def cluster(kubectl: FakeKubectl, deploy: object) -> None:
    """A pod under pressure, made by a ReplicaSet, made by a Deployment."""
    running = pod()
    running["metadata"] |= owned("ReplicaSet", "apps/v1", "chat-5d9")["metadata"]
    kubectl.answers = [
        ("get pods -o json", json.dumps({"items": [running]})),
        ("get pod vllm-0 -o json", json.dumps(running)),
        ("get replicaset.v1.apps chat-5d9", json.dumps(owned("Deployment", "apps/v1", "chat"))),
        ("get deployment.v1.apps chat", deploy if isinstance(deploy, Exception) else json.dumps(deploy)),
        ("get deploy chat", deploy if isinstance(deploy, Exception) else json.dumps(deploy)),
        ("get events", json.dumps({"items": []})),
        ("logs", ""),
        ("get --raw proxy/version", '{"version":"0.11.2"}'),
        (f"get --raw {PAGES}", pages("d_kv_pressure", 60)),
    ]
    kubectl.install()


DEPLOYMENT = owned("", "", "", owners=0)


@pytest.mark.parametrize(
    ("deploy", "commands"),
    [
        (DEPLOYMENT, ("edit -n inference deployment/chat", "rollout status -n inference deployment/chat")),
        (FORBIDDEN, ("edit -n inference deployment/chat", "rollout status -n inference deployment/chat")),
        (
            owned("LLMInferenceService", "serving.kserve.io/v1alpha1", "llm"),
            ("edit -n inference llminferenceservice/llm", "get -n inference llminferenceservice/llm -w"),
        ),
    ],
)
def test_the_plan_names_what_people_edit(
    capsys: Capsys, kubectl: FakeKubectl, deploy: object, commands: tuple[str, ...]
) -> None:
    cluster(kubectl, deploy)
    status, out, _ = run(capsys, "mitigate -n inference -l app=vllm --seconds 20")
    assert status == 0
    assert [f"$ kubectl {words}" in out for words in commands] == [True, True]
    assert {call[0] for call in kubectl.calls} <= {"get", "logs"}


def test_the_pods_of_a_workload(capsys: Capsys, kubectl: FakeKubectl) -> None:
    cluster(kubectl, DEPLOYMENT)
    assert run(capsys, "mitigate -n inference --workload deploy/chat --seconds 20")[0] == 0
    assert next(call for call in kubectl.calls if "pods" in call)[4:6] == ["-l", "app=vllm,tier=a"]
