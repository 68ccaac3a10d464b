"""The patch: from manifests and straight from the cluster, merged right, and refused where it would not reach vLLM."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml

from kvpressure.cli import main
from kvpressure.errors import InputError
from kvpressure.toolbox import manifests, patches
from kvpressure.toolbox.manifests import ServerContainer
from tests.helpers.command import Capsys, refused, run
from tests.toolbox.conftest import FakeKubectl
from tests.toolbox.test_audit import deployment
from tests.toolbox.test_cluster import PAGES, pages, pod

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("clock")]

VALUES = {"max_num_seqs": 7.0}


def server(document: dict[str, Any]) -> ServerContainer:
    (found,) = manifests.servers_of(document)
    return found


def workload(args: list[str] | None = None, command: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A Deployment whose vLLM container is the second one, behind a proxy."""
    options: dict[str, Any] = {} if command is None else {"command": command}
    document = copy.deepcopy(deployment(args or [], **options))
    containers = document["spec"]["template"]["spec"]["containers"]
    containers[0].update(more)
    if args is None:
        containers[0].pop("args", None)
    containers.insert(0, {"name": "proxy", "image": "envoy:v1"})
    return document


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["--max-num-seqs", "256", "--port", "8000"], ["--max-num-seqs", "7", "--port", "8000"]),
        (["--max-num-seqs=256", "--port=8000"], ["--max-num-seqs=7", "--port=8000"]),
        (["--max_num_seqs=256"], ["--max_num_seqs=7"]),
        (["--port", "8000"], ["--port", "8000", "--max-num-seqs", "7"]),
        (["--max-num-seqs", "256", "--enforce-eager", "--max-num-seqs=9"], ["--max-num-seqs", "7", "--enforce-eager"]),
        (["--max-num-seqs", "$(SEQS)"], ["--max-num-seqs", "7"]),
    ],
)
def test_both_forms_of_a_flag_are_replaced_in_place(before: list[str], after: list[str]) -> None:
    kind, content = patches.as_patch(server(workload(before)), VALUES)
    assert kind == "strategic"
    assert content == {"spec": {"template": {"spec": {"containers": [{"name": "vllm", "args": after}]}}}}


def test_arguments_in_command_stay_in_command() -> None:
    _, content = patches.as_patch(server(workload(None, ["vllm", "serve", "llama", "--max-num-seqs=256"])), VALUES)
    assert content["spec"]["template"]["spec"]["containers"] == [
        {"name": "vllm", "command": ["vllm", "serve", "llama", "--max-num-seqs=7"]}
    ]


def test_a_native_sidecar_is_changed_where_it_stands() -> None:
    document = workload(["--max-num-seqs", "256"])
    spec = document["spec"]["template"]["spec"]
    spec["initContainers"] = [{**spec["containers"].pop(), "restartPolicy": "Always"}]
    found = server(document)
    assert found.pointer == ("spec", "template", "spec", "initContainers", 0)
    _, content = patches.as_patch(found, VALUES)
    assert content == {
        "spec": {"template": {"spec": {"initContainers": [{"name": "vllm", "args": ["--max-num-seqs", "7"]}]}}}
    }


@pytest.mark.parametrize(
    ("script", "after"),
    [
        ('vllm serve "$MODEL" --max-num-seqs 256', 'vllm serve "$MODEL" --max-num-seqs 7'),
        ("vllm serve llama --max-num-seqs $SEQS --port $PORT", "vllm serve llama --max-num-seqs 7 --port $PORT"),
        ("cd $HOME && exec vllm serve llama", "cd $HOME && exec vllm serve llama --max-num-seqs 7"),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model llama",
            "python3 -m vllm.entrypoints.openai.api_server --max-num-seqs 7 --model llama",
        ),
    ],
)
def test_shell_strings_keep_everything_else(script: str, after: str) -> None:
    _, content = patches.as_patch(server(workload([script], ["sh", "-c"])), VALUES)
    assert content["spec"]["template"]["spec"]["containers"] == [{"name": "vllm", "args": [after]}]


def configured(name: str, kind: str = "configMapKeyRef") -> dict[str, Any]:
    return {"name": name, "valueFrom": {kind: {"name": "chat-args", "key": "args"}}}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (workload(["vllm serve llama $EXTRA"], ["sh", "-c"], env=[configured("EXTRA")]), "EXTRA from ConfigMap"),
        (
            workload(["--model", "llama", "$(EXTRA)"], env=[configured("EXTRA", "secretKeyRef")]),
            "EXTRA from Secret chat-args",
        ),
        (workload(["vllm serve llama ${EXTRA:-}"], ["sh", "-c"]), "EXTRA from elsewhere"),
        (
            workload(["vllm serve llama $EXTRA"], ["sh", "-c"], env=[{"name": "EXTRA", "value": "--max-num-seqs 256"}]),
            "EXTRA in the container's env",
        ),
        (
            workload(["/start.sh"], [], env=[{"name": "VLLM_ARGS", "value": "--max-num-seqs 256"}]),
            "VLLM_ARGS in the container's env",
        ),
        (workload(None, [], env=[configured("MAX_NUM_SEQS")]), "MAX_NUM_SEQS from ConfigMap chat-args"),
        (workload(None, [], envFrom=[{"configMapRef": {"name": "limits"}}]), "* from ConfigMap limits"),
        (workload(["vllm serve llama $(cat /args)"], ["sh", "-c"]), "hides part of the command line"),
    ],
)
def test_what_a_patch_cannot_reach_is_said(document: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        patches.as_patch(server(document), VALUES)
    assert said in str(error.value)
    assert "deployment/inference/chat:vllm" in str(error.value)
    assert re.search("; set the values in that variable$| by hand", str(error.value))


def test_a_literal_variable_that_is_only_a_value_hides_nothing() -> None:
    document = workload(
        ["vllm serve llama --port $PORT --max-num-seqs $SEQS"],
        ["sh", "-c"],
        env=[{"name": "PORT", "value": "8000"}, {"name": "SEQS", "value": "256"}],
    )
    _, content = patches.as_patch(server(document), VALUES)
    assert content["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "vllm serve llama --port $PORT --max-num-seqs 7"
    ]


def test_a_custom_resource_is_patched_by_its_index() -> None:
    template = {"spec": {"containers": workload(["--max-num-seqs", "256"])["spec"]["template"]["spec"]["containers"]}}
    document = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "big", "namespace": "inference"},
        "spec": {"leaderWorkerTemplate": {"workerTemplate": template}},
    }
    found = server(document)
    where = "/spec/leaderWorkerTemplate/workerTemplate/spec/containers/1"
    assert patches.as_patch(found, VALUES) == (
        "json",
        [
            {"op": "test", "path": f"{where}/name", "value": "vllm"},
            {"op": "add", "path": f"{where}/args", "value": ["--max-num-seqs", "7"]},
        ],
    )
    assert patches.command(found, "json") == "kubectl patch lws/big -n inference --type json --patch-file THIS_FILE"


def test_a_running_pod_cannot_be_patched() -> None:
    with pytest.raises(InputError, match="cannot be changed"):
        patches.as_patch(server({"kind": "Pod"} | pod()), VALUES)


def test_who_manages_the_workload_is_noted() -> None:
    document = workload(["--max-num-seqs=$(SEQS)", "--config", "/etc/vllm.yaml"])
    document["metadata"]["annotations"] = {"meta.helm.sh/release-name": "chat"}
    said = list(patches.notes(server(document), VALUES))
    assert said[0].startswith("managed by Helm release chat")
    assert any("--config" in note for note in said)
    assert any("--max-num-seqs was $(SEQS)" in note for note in said)


# --- straight from the cluster ----------------------------------------------------------------------------


def owned(document: dict[str, Any], kind: str, name: str, group: str = "apps/v1") -> dict[str, Any]:
    document["metadata"]["ownerReferences"] = [{"kind": kind, "name": name, "apiVersion": group, "controller": True}]
    return document


def cluster(kubectl: FakeKubectl, deploy: Any) -> None:
    """A pod under pressure, made by a ReplicaSet, made by a Deployment."""
    running = owned(pod(), "ReplicaSet", "chat-5d9")
    made = copy.deepcopy(deploy) if isinstance(deploy, dict) else workload(["--max-num-seqs", "64"])
    made["kind"] = "ReplicaSet"
    kubectl.answers = [
        ("get pods -o json", json.dumps({"items": [running]})),
        ("get pod vllm-0 -o json", json.dumps({"kind": "Pod"} | running)),
        ("get replicaset.v1.apps chat-5d9", json.dumps(owned(made, "Deployment", "chat"))),
        ("get deployment.v1.apps chat", deploy if isinstance(deploy, Exception) else json.dumps(deploy)),
        ("get deploy chat", deploy if isinstance(deploy, Exception) else json.dumps(deploy)),
        ("get events", json.dumps({"items": []})),
        ("logs", ""),
        ("get --raw proxy/version", '{"version":"0.11.2"}'),
        (f"get --raw {PAGES}", pages("d_kv_pressure", 60)),
    ]
    kubectl.install()


def patch(*more: str) -> int:
    return main(["mitigate", "-n", "inference", *more, "--seconds", "20", "--format", "patch"])


def test_a_patch_straight_from_the_cluster(capsys: Capsys, kubectl: FakeKubectl) -> None:
    cluster(kubectl, workload(["--max-num-seqs", "64", "--model", "tiny"]))
    assert patch("-l", "app=vllm") == 0
    text = capsys.readouterr().out
    assert "kubectl patch deploy/chat -n inference --type strategic --patch-file THIS_FILE" in text
    container = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]
    assert container["name"] == "vllm"
    assert container["args"][:1] == ["--max-num-seqs"]
    assert 0 < int(container["args"][1]) < 64
    assert container["args"][2:4] == ["--model", "tiny"]
    assert {call[0] for call in kubectl.calls} <= {"get", "logs"}


def test_the_pods_of_a_workload(capsys: Capsys, kubectl: FakeKubectl) -> None:
    document = workload(["--max-num-seqs", "64"])
    document["spec"]["selector"] = {"matchLabels": {"app": "vllm", "tier": "a"}}
    cluster(kubectl, document)
    assert patch("--workload", "deploy/chat") == 0
    assert next(call for call in kubectl.calls if "pods" in call)[4:6] == ["-l", "app=vllm,tier=a"]
    assert "kubectl patch deploy/chat" in capsys.readouterr().out
    _, out, _ = run(capsys, "mitigate -n inference --workload deploy/chat --seconds 20")
    assert "kubectl rollout status -n inference deployment/chat" in out


def test_a_workload_that_may_not_be_read(capsys: Capsys, kubectl: FakeKubectl) -> None:
    cluster(kubectl, Exception('Error from server (Forbidden): deployments.apps "chat" is forbidden'))
    said = refused(capsys, "mitigate -n inference -l app=vllm --seconds 20 --format patch")
    assert "is forbidden" in said
    assert "--manifest FILE" in said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--workload deploy/chat", "with -n NAMESPACE"),
        ("-n x -l a=b --workload deploy/chat", "without -l"),
        ("-n x --workload chat", "KIND/NAME"),
        ("-n x --workload deploy/-o", "KIND/NAME"),
        ("-n x --workload --context/a", "--workload"),
    ],
)
def test_bad_workloads_are_one_clear_line(capsys: Capsys, kubectl: FakeKubectl, typed: str, said: str) -> None:
    cluster(kubectl, workload(["--max-num-seqs", "64"]))
    assert said in refused(capsys, f"mitigate {typed}")


@pytest.mark.parametrize("word", ["[redacted]", "--api-key=[redacted]", "$(kvpressure.cut)"])
def test_a_hidden_value_is_never_written_back(word: str) -> None:
    with pytest.raises(InputError, match="redacted"):
        patches.as_patch(server(workload(["--max-num-seqs", "256", "--api-key", word])), VALUES)


def test_a_patch_carries_the_manifest_as_it_is() -> None:
    _, content = patches.as_patch(server(workload(["--api-key", "sk-0123", "--max-num-seqs", "256"])), VALUES)
    assert content["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "--api-key",
        "sk-0123",
        "--max-num-seqs",
        "7",
    ]
