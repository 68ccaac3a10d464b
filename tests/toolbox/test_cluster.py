"""``diagnose -n``: the guides' steps through kubectl, against a kubectl that replays what was recorded."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
import yaml

from kvpressure.recording.reader import Reader
from kvpressure.toolbox.kubectl import Kubectl
from tests.helpers.command import Capsys, answer, refused
from tests.toolbox.conftest import FIXTURES, START, FakeKubectl

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("clock")]

PAGES = "/api/v1/namespaces/inference/pods/vllm-0:8000/proxy/metrics"


@cache
def pages(name: str, skip: int) -> list[str]:
    """The pages of a recording, from the tick ``skip`` on."""
    with Reader(FIXTURES / f"recordings/vllm-cpu/{name}.jsonl.gz", keep_exposition=True) as reader:
        texts = [page.exposition for snapshot in reader for page in snapshot.pages if page.exposition]
    return texts[skip:]


def pod(name: str = "vllm-0", **status: Any) -> dict[str, Any]:
    """A pod as ``kubectl get pods -o json`` shows it."""
    container = {"name": "vllm", "restartCount": 0, "ready": True, "state": {"running": {}}}
    spec = yaml.safe_load("""
        nodeName: node-7
        containers:
        - name: vllm
          image: vllm/vllm-openai:v0.11.2
          ports: [{containerPort: 8000}]
          args: [--model, tiny, --max-num-seqs, '64']
          resources: {limits: {nvidia.com/gpu: '1'}}
        """)
    metadata = {"namespace": "inference", "name": name, "uid": f"uid-{name}", "labels": {"app": "vllm"}}
    seen = {"phase": "Running", "podIP": "10.0.0.5", "containerStatuses": [container | status]}
    return {"metadata": metadata, "spec": spec, "status": seen}


def killed(reason: str = "OOMKilled", code: int = 137) -> dict[str, Any]:
    return {
        "restartCount": 3,
        "lastState": {"terminated": {"reason": reason, "exitCode": code, "finishedAt": "2027-01-15T07:55:00Z"}},
    }


def stamped(seconds_ago: float, text: str) -> str:
    """A line as ``kubectl logs --timestamps`` prints it."""
    return f"{datetime.fromtimestamp(START - seconds_ago, UTC):%Y-%m-%dT%H:%M:%S}.123456789Z {text}\n"


def event(reason: str, name: str, kind: str = "Pod", message: str = "why", **more: Any) -> dict[str, Any]:
    return {
        "reason": reason,
        "message": message,
        "lastTimestamp": "2027-01-15T07:59:00Z",
        "involvedObject": {"kind": kind, "name": name},
    } | more


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def prepare(
    kubectl: FakeKubectl,
    *,
    pods: list[dict[str, Any]] | None = None,
    metrics: Any = None,
    log: str = "",
    previous: Any = None,
    events: Any = None,
) -> None:
    """A namespace with one pod unless said otherwise."""
    kubectl.answers = [
        ("get pods -o json", json.dumps({"items": [pod()] if pods is None else pods})),
        ("get events", events if isinstance(events, Exception) else json.dumps({"items": events or []})),
        ("logs --previous", previous if previous is not None else Exception("previous terminated container not found")),
        ("logs", log),
        ("get --raw proxy/version", '{"version":"0.11.2"}'),
        (f"get --raw {PAGES}", metrics if metrics is not None else pages("d_kv_pressure", 60)),
    ]
    kubectl.install()


def diagnose(capsys: Capsys, *more: str) -> tuple[int, dict[str, Any]]:
    return answer(capsys, "diagnose -n inference -l app=vllm --seconds 20", *more)


def step(document: dict[str, Any], number: int) -> dict[str, Any]:
    return document["engines"][0]["triage"][number - 1]


def test_all_steps_of_a_pod_under_pressure(capsys: Capsys, kubectl: FakeKubectl) -> None:
    prepare(
        kubectl,
        pods=[pod(**killed())],
        log=stamped(60, OOM),
        previous=stamped(900, OOM) * 2,
        events=[
            event("Evicted", "other", "Pod"),
            event("FailedScheduling", "vllm-0", message="0/3 nodes are available", count=4),
            event("Scheduled", "vllm-0"),
            event("EvictionThresholdMet", "node-7", "Node"),
            event("NodeNotReady", "node-8", "Node"),
        ],
    )
    status, document = diagnose(capsys)
    engine = document["engines"][0]
    assert status == 1
    assert (engine["verdict"], engine["stage"]) == ("kv_pressure", "failing")
    assert (engine["namespace"], engine["pod"]) == ("inference", "vllm-0")
    assert engine["engine"]["limits"]["max_num_seqs"]["value"] == 64
    assert "node-7" in " ".join(step(document, 1)["answers"])
    assert step(document, 2)["finding"] == "bad"
    assert "OOMKilled" in " ".join(step(document, 2)["answers"])
    logs = " ".join(step(document, 4)["answers"])
    assert step(document, 4)["finding"] == "bad"
    assert "Running container, last two hours: cuda oom 1" in logs
    assert "Previous container: cuda oom 2" in logs
    events = " ".join(step(document, 6)["answers"])
    assert "FailedScheduling pod/vllm-0: 0/3 nodes are available (4x)" in events
    assert "node/node-7" in events
    assert "other" not in events
    assert "node-8" not in events
    assert "Scheduled pod" not in events
    assert "Port 8000" in " ".join(step(document, 7)["answers"])


def test_an_old_failure_in_the_log_is_told_and_does_not_count_as_now(capsys: Capsys, kubectl: FakeKubectl) -> None:
    prepare(kubectl, log=stamped(3600, OOM))
    _, document = diagnose(capsys)
    assert document["engines"][0]["stage"] != "failing"
    assert step(document, 4)["finding"] == "bad"


def test_common_problem_oom_with_few_requests(capsys: Capsys, kubectl: FakeKubectl) -> None:
    prepare(kubectl, pods=[pod(**killed("Error", 1))], metrics=pages("a_idle", 0), previous=stamped(900, OOM))
    _, document = diagnose(capsys)
    problems = {problem["name"]: problem["present"] for problem in document["engines"][0]["common_problems"]}
    assert problems["oom_with_few_requests"] is True


def test_only_reading_verbs_are_used(capsys: Capsys, kubectl: FakeKubectl) -> None:
    prepare(kubectl)
    diagnose(capsys, "--context", "staging")
    assert {call[2] for call in kubectl.calls} == {"get", "logs"}
    assert not any("--previous" in call for call in kubectl.calls), "only after a restart"
    assert all(call[:2] == ["--context", "staging"] for call in kubectl.calls)
    with pytest.raises(ValueError, match="not a reading verb"):
        Kubectl().run("delete", "pod")


def test_what_may_not_be_read_is_said(capsys: Capsys, kubectl: FakeKubectl) -> None:
    prepare(kubectl, events=Exception("Error from server (Forbidden): events is forbidden"))
    kubectl.answers[3] = ("logs", Exception("Error from server (Forbidden): pods/log is forbidden"))
    kubectl.install()
    _, document = diagnose(capsys)
    assert step(document, 4)["finding"] == "unknown"
    assert "pods/log is forbidden" in " ".join(step(document, 4)["answers"])
    assert step(document, 6)["finding"] == "unknown"
    assert document["engines"][0]["verdict"] == "kv_pressure"


def test_a_page_that_the_proxy_does_not_reach(capsys: Capsys, kubectl: FakeKubectl) -> None:
    prepare(
        kubectl, metrics=Exception("Error from server (ServiceUnavailable): dial tcp 10.0.0.5:8000: connection refused")
    )
    status, document = diagnose(capsys)
    assert (status, document["engines"][0]["verdict"]) == (1, "unknown")
    assert step(document, 7)["finding"] == "bad"
    assert "connection refused" in " ".join(step(document, 7)["answers"])


def test_several_pods_and_one_that_is_pending(capsys: Capsys, kubectl: FakeKubectl) -> None:
    pending = pod("vllm-1")
    pending["status"] = {"phase": "Pending"}
    prepare(kubectl, pods=[pod(), pending])
    _, document = diagnose(capsys)
    assert {engine["pod"]: engine["verdict"] for engine in document["engines"]} == {
        "vllm-0": "kv_pressure",
        "vllm-1": "unknown",
    }
    first = next(engine for engine in document["engines"] if engine["pod"] == "vllm-1")["triage"][0]
    assert first["finding"] == "bad"
    assert "Pending" in " ".join(first["answers"])
    _, document = diagnose(capsys, "--pod", "vllm-0")
    assert [engine["pod"] for engine in document["engines"]] == ["vllm-0"]


def test_the_two_sides_of_a_pair_are_compared(capsys: Capsys, kubectl: FakeKubectl) -> None:
    pods = [pod("vllm-0"), pod("vllm-1")]
    for one, role in zip(pods, ("decode", "prefill"), strict=True):
        one["metadata"]["labels"]["llm-d.ai/role"] = role
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": f"vllm-{role}", "controller": True}
        one["metadata"]["ownerReferences"] = [owner]
    prepare(kubectl, pods=pods)
    kubectl.answers.append((f"get --raw {PAGES.replace('vllm-0', 'vllm-1')}", pages("a_idle", 0)))
    kubectl.install()
    _, document = diagnose(capsys)
    decode = document["engines"][0]
    assert decode["cause"].endswith("; prefill has spare capacity")
    assert decode["next_steps"][0]["title"] == "Add decode replicas"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"items": []}', "no pod runs vLLM or SGLang (pods found: 0)"),
        ("not json", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[]", "no pod runs vLLM"),
        ('{"items": [1, {"metadata": 3}]}', "runs vLLM"),
        (Exception('Error from server (Forbidden): pods is forbidden: User "me"'), "pods is forbidden"),
    ],
)
def test_pods_that_cannot_be_had(capsys: Capsys, kubectl: FakeKubectl, answer: Any, said: str) -> None:
    kubectl.answers = [("get pods", answer)]
    kubectl.install()
    assert said in refused(capsys, "diagnose -n inference -l app=vllm")


def test_without_kubectl(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "-n needs kubectl: not found in PATH" in refused(capsys, "diagnose -n inference")
