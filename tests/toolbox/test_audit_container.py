"""``kvpressure audit``: a server container's CPU limit, shared memory and start time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import EngineArgs
from tests.helpers.command import Capsys, answer

MODEL = "meta-llama/Llama-3.1-8B"
MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
MOUNT = {"name": "shm", "mountPath": "/dev/shm"}


def document(args: list[str] | None = None, spec: dict[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    """A deployment of vLLM with these arguments, pod settings and container settings."""
    server = {"name": "vllm", "image": "vllm/vllm-openai:v0.11.2", "command": ["vllm", "serve", MODEL]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat"},
        "spec": {"template": {"spec": {"containers": [{**server, "args": args or [], **container}], **(spec or {})}}},
    }


def items(capsys: Capsys, tmp_path: Path, found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Items of the one server by name."""
    file = tmp_path / "deployed.yaml"
    file.write_text(yaml.safe_dump(found))
    (server,) = answer(capsys, "audit", file)[1]["servers"]
    return {item["name"]: item for item in server["items"]}


def one(capsys: Capsys, tmp_path: Path, name: str, found: dict[str, Any]) -> tuple[str, str, str]:
    """(result, found, set) of one item."""
    item = items(capsys, tmp_path, found)[name]
    return item["result"], item["found"], item["set"]


@pytest.mark.parametrize(
    ("args", "limits", "result", "found"),
    [
        ([], {"nvidia.com/gpu": "1"}, "pass", "no CPU limit"),
        ([], {"nvidia.com/gpu": "1", "cpu": "3"}, "pass", "CPU limit 3; 3 processes"),
        ([], {"nvidia.com/gpu": "1", "cpu": "2500m"}, "fail", "CPU limit 2.5; 3 processes"),
        (["--tensor-parallel-size=4"], {"nvidia.com/gpu": "4", "cpu": "5"}, "fail", "CPU limit 5; 6 processes"),
        (["--tensor-parallel-size=4"], {"amd.com/gpu": "4", "cpu": "6"}, "pass", "CPU limit 6; 6 processes"),
        (["-tp=2", "-dp=4"], {"nvidia.com/gpu": "8", "cpu": "16"}, "fail", "CPU limit 16; 17 processes"),
    ],
)
def test_a_cpu_limit_below_the_number_of_processes_fails(
    capsys: Capsys, tmp_path: Path, args: list[str], limits: dict[str, str], result: str, found: str
) -> None:
    seen = one(capsys, tmp_path, "cpu_limit", document(args, resources={"limits": limits}))
    assert seen[:2] == (result, found)
    assert bool(seen[2]) is (result == "fail")


def test_the_processes_are_those_of_the_engines_documentation() -> None:
    """VLLM's "Architecture Overview": 6 processes with -tp=4, 17 with -tp=2 -dp=4."""
    vllm = dialect("vllm").processes
    assert vllm(EngineArgs({"tensor_parallel_size": "4"}), 4) == 6
    assert vllm(EngineArgs({"tensor_parallel_size": "2", "data_parallel_size": "4"}), 8) == 17
    assert vllm(EngineArgs({"api_server_count": "1", "data_parallel_size": "4"}), 4) == 1 + 4 + 4 + 1
    assert vllm(EngineArgs({"data_parallel_size": "16", "data_parallel_size_local": "8"}), 8) == 8 + 8 + 8 + 1
    assert dialect("sglang").processes(EngineArgs(), 2) == 4


@pytest.mark.parametrize(
    ("args", "spec", "mounts", "result"),
    [
        (["-tp=2"], {}, [], "fail"),
        (["-tp=1"], {}, [], "pass"),
        (["-tp=2"], {"volumes": [MEMORY]}, [MOUNT], "pass"),
        (["-tp=2"], {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}, [MOUNT], "pass"),
        (["-tp=2"], {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "512Mi"}}]}, [MOUNT], "fail"),
        (["-tp=2"], {"volumes": [MEMORY]}, [{"name": "shm", "mountPath": "/cache"}], "fail"),
        (["-tp=2"], {"hostIPC": True}, [], "pass"),
    ],
)
def test_shared_memory_is_asked_for_where_several_gpus_exchange_data(
    capsys: Capsys, tmp_path: Path, args: list[str], spec: dict[str, Any], mounts: list[dict[str, str]], result: str
) -> None:
    assert one(capsys, tmp_path, "shared_memory", document(args, spec, volumeMounts=mounts))[0] == result


@pytest.mark.parametrize(
    ("probes", "result", "words"),
    [
        ({}, "pass", "no startup or liveness probe"),
        (
            {"livenessProbe": {"periodSeconds": 5, "failureThreshold": 4}},
            "fail",
            "livenessProbe restarts the server after 20 s",
        ),
        ({"livenessProbe": {"initialDelaySeconds": 120}}, "cannot see", "after 2 min 30 s; a start takes between"),
        (
            {"startupProbe": {"failureThreshold": 60}, "livenessProbe": {}},
            "pass",
            "startupProbe restarts the server after 10 min",
        ),
        (
            {"startupProbe": {"failureThreshold": 1}, "livenessProbe": {"initialDelaySeconds": 900}},
            "fail",
            "startupProbe",
        ),
    ],
)
def test_a_probe_that_ends_the_fastest_start_fails(
    capsys: Capsys, tmp_path: Path, probes: dict[str, Any], result: str, words: str
) -> None:
    seen = one(capsys, tmp_path, "start_time", document(**probes))
    assert seen[0] == result
    assert words in seen[1]


def test_the_advised_startup_probe_passes(capsys: Capsys, tmp_path: Path) -> None:
    _, _, advice = one(capsys, tmp_path, "start_time", document(livenessProbe={"initialDelaySeconds": 30}))
    period, failures = (int(word) for word in advice.split() if word.isdecimal())
    probe = {"periodSeconds": period, "failureThreshold": failures}
    assert one(capsys, tmp_path, "start_time", document(startupProbe=probe))[0] == "pass"


def test_a_model_of_unknown_size_is_neither_failed_nor_passed(capsys: Capsys, tmp_path: Path) -> None:
    probe = {"startupProbe": {"failureThreshold": 60}}
    unknown = document(command=["vllm", "serve", "someone/their-own"], **probe)
    assert one(capsys, tmp_path, "start_time", unknown)[:2] == (
        "cannot see",
        "startupProbe restarts the server after 10 min; model size unknown",
    )
