"""``kvpressure discover``: what it prints for every pod of ``tests/fixtures/pods``, from a file and an exporter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.cli import main
from kvpressure.model.readings import Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.sources.kubernetes.pod import discovered
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.helpers.command import Capsys, answer, refused, run
from tests.toolbox.conftest import FakeKubectl, ServeJson

PODS = Path(__file__).parents[1] / "fixtures" / "pods"
EXPECTED: Mapping[str, Any] = yaml.safe_load((PODS / "expected.yaml").read_text())["pods"]
ENGINES = [
    (name, container, want) for name, said in EXPECTED.items() for container, want in said.get("engines", {}).items()
]

NOT_READ_IN_FULL = {  # what a script computes is called unknown, which is safe
    ("kserve/llmisvc-prefill.json", "main"),
    ("kserve/vllmserver.json", "kserve-container"),
}


def entries(capsys: Capsys, *arguments: str) -> dict[str, dict[str, Any]]:
    found: Any = answer(capsys, "discover", *arguments)[1]
    return {entry["container"]: entry for entry in found}


@pytest.mark.parametrize(("name", "container", "want"), ENGINES)
def test_gpus_and_completeness_of_each_engine(
    name: str, container: str, want: Mapping[str, Any], capsys: Capsys
) -> None:
    found = entries(capsys, "-f", str(PODS / name))[container]
    assert found["result"] == ("no_target" if want["port"] is None else "engine")
    assert found["gpus"] == {resource: float(count) for resource, count in want.get("gpus", {}).items()}
    if want["port"] is not None:
        assert found["complete"] is (want["complete"] and (name, container) not in NOT_READ_IN_FULL)
        assert found["address"].endswith(f":{want['port']}{want['path']}")


def test_a_running_exporter_answers_the_same_as_a_file(capsys: Capsys, serve_json: ServeJson) -> None:
    name = "aibrix/deployment.json"
    pod = read_pod(json.loads((PODS / name).read_text()), Policy())
    assert pod is not None
    state = Pipeline().observe(Snapshot(1.0, discovered=discovered([pod])))
    address = serve_json({"/api/v1/diagnosis": diagnosis_document(state, "node")})
    of_file = entries(capsys, "-f", str(PODS / name))
    for entry in of_file.values():  # the exporter knows those of an engine that answered
        entry["arguments"] = {word: one for word, one in entry["arguments"].items() if one["source"] == "args"}
    assert entries(capsys, "--exporter", address) == of_file


def test_an_exporter_adds_the_limits_in_force(capsys: Capsys, serve_json: ServeJson) -> None:
    """What the engine's page or log says outweighs the command line."""
    row = {"container": "vllm", "address": "http://10.0.0.1:8000/metrics", "arguments": {"max_num_seqs": "64"}}
    limits = {
        "max_num_seqs": {"value": 32.0, "explicit": True, "source": "log"},
        "gpu_memory_utilization": {"value": 0.9, "explicit": None, "source": "default"},
        "max_model_len": {"value": None, "explicit": None, "source": None},
    }
    engines = [{"target": row["address"], "limits": limits}, {"target": "http://10.0.0.2:8000/metrics", "limits": {}}]
    address = serve_json({"/api/v1/diagnosis": {"engines": engines, "discovered": [row]}})
    assert entries(capsys, "--exporter", address)["vllm"]["arguments"] == {
        "max_num_seqs": {"value": "32", "source": "log"},
        "gpu_memory_utilization": {"value": "0.9", "source": "assumed"},
    }


def test_the_text_says_why_and_the_status_whether_something_is_not_scraped(capsys: Capsys) -> None:
    status, said, _ = run(capsys, "discover -f", PODS / "aibrix/deployment.json")
    assert (status, "vllm-openai: engine (" in said) == (0, True)
    status, said, _ = run(capsys, "discover -f", PODS / "variants/port-configmap.json")
    assert (status, "engine, not scraped (port_unknown)" in said) == (1, True)
    assert "8000" not in said


@pytest.mark.parametrize(("more", "source"), [([], "default"), (["$(MORE)"], "assumed")])
def test_each_argument_has_its_source(more: list[str], source: str, capsys: Capsys, tmp_path: Path) -> None:
    """A default is assumed where a variable may have set another value."""
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.11.2", "args": ["--model=m", "--max-num-seqs=64", *more]}
    template = {"spec": {"containers": [container]}}
    made = {"kind": "StatefulSet", "metadata": {"name": "chat-decode"}, "spec": {"template": template}}
    file = written(tmp_path, made)
    row = entries(capsys, "-f", file)["vllm"]
    assert row["arguments"]["max_num_seqs"] == {"value": "64", "source": "args"}
    assert row["arguments"]["gpu_memory_utilization"] == {"value": "0.9", "source": source}
    assert (row["group"], row["role"]) == ("chat-decode", "decode")
    out = run(capsys, "discover -f", file)[1]
    assert "  group: chat-decode, role decode\n" in out
    assert f"    gpu_memory_utilization: 0.9 ({source})\n" in out


WORKER: dict[str, Any] = yaml.safe_load("""
spec:
  containers:
  - name: worker
    image: vllm/vllm-openai:v0.32.0
    command: [sh, -c, bash start.sh --ray_address=$(LWS_LEADER_ADDRESS)]
    resources: {limits: {nvidia.com/gpu: '8'}}
""")


def written(tmp_path: Path, *documents: Mapping[str, Any]) -> str:
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return str(file)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"leaderWorkerTemplate": {"leaderTemplate": {"spec": {}}, "workerTemplate": WORKER}}, "no_endpoint"),
        ({"leaderWorkerTemplate": {"workerTemplate": WORKER}}, "image"),  # the leader is made of it too
        ({"workerGroupSpecs": [{"groupName": "gpu", "template": WORKER}]}, "no_endpoint"),
        ({"headGroupSpec": {"template": WORKER}}, "image"),
    ],
)
def test_a_template_of_workers_is_what_its_controller_makes_of_it(
    spec: Mapping[str, Any], reason: str, capsys: Capsys, tmp_path: Path
) -> None:
    file = written(tmp_path, {"kind": "LeaderWorkerSet", "metadata": {"name": "big"}, "spec": spec})
    assert entries(capsys, "-f", file)["worker"]["reason"] == reason


def as_list(names: Iterable[str]) -> str:
    """What ``kubectl get pods -o json`` prints for these pods."""
    items = [json.loads((PODS / name).read_text()) for name in names]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items, "metadata": {"resourceVersion": ""}})


def test_a_namespace_is_read_through_kubectl(capsys: Capsys, kubectl: FakeKubectl) -> None:
    """All pods of the projects together, as one namespace."""
    names = [name for name in EXPECTED if name.endswith(".json")]
    kubectl.answers = [("get pods", as_list(names))]
    kubectl.install()
    main(["discover", "-n", "inference", "--context", "prod", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert kubectl.calls == [["--context", "prod", "get", "pods", "-n", "inference", "-o", "json"]]
    assert {container for _, container, _ in ENGINES} <= {entry["container"] for entry in found}
    assert len(ENGINES) >= 50


def test_a_namespace_without_engines_is_one_clear_line(capsys: Capsys, kubectl: FakeKubectl) -> None:
    kubectl.answers = [("get pods", as_list([]))]
    kubectl.install()
    said = refused(capsys, "discover -n inference -l app=vllm")
    assert "0 pods: no container with an accelerator or an inference server" in said
    assert kubectl.calls[-1][-4:] == ["-l", "app=vllm", "-o", "json"]


def test_an_address_without_discovery_is_one_clear_line(capsys: Capsys) -> None:
    refused(capsys, "discover --exporter 127.0.0.1:1")
    assert "--selector: only together with -n NAMESPACE" in refused(capsys, "discover -l app=vllm -f -")
