"""``kvpressure audit``: a server container's CPU limit, shared memory and start time; KServe's LLMInferenceService."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.engines.registry import dialect
from kvpressure.errors import InputError
from kvpressure.model.arguments import EngineArgs
from kvpressure.toolbox import manifests, patches
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


# --- KServe's LLMInferenceService -------------------------------------------------------------------------


def llm(**spec: Any) -> dict[str, Any]:
    """An LLMInferenceService in the form of KServe's samples (docs/samples/llmisvc)."""
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "LLMInferenceService",
        "metadata": {"name": "qwen"},
        "spec": {
            "model": {"uri": "hf://Qwen/Qwen2.5-7B-Instruct", "name": "Qwen/Qwen2.5-7B-Instruct"},
            "template": {
                "containers": [
                    {
                        "name": "main",
                        "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": "--max-num-seqs 64 --max-model-len=8192"}],
                        "resources": {"limits": {"cpu": "4", "nvidia.com/gpu": "2"}},
                    }
                ]
            },
            **spec,
        },
    }


PREFILL = {
    "parallelism": {"tensor": 4},
    "template": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]},
}


def test_an_llm_inference_service_is_read_with_the_arguments_that_kserve_adds() -> None:
    decode, prefill = manifests.servers_of(llm(parallelism={"tensor": 2}, prefill=PREFILL))
    assert (decode.title, prefill.title) == ("llminferenceservice/qwen:main", "llminferenceservice/qwen:prefill/main")
    assert decode.args.values == {
        "tensor_parallel_size": "2",
        "max_num_seqs": "64",
        "max_model_len": "8192",
        "model": "Qwen/Qwen2.5-7B-Instruct",
    }
    assert decode.args.complete
    assert prefill.args.tensor_parallel_size == 4


def test_arguments_of_a_configuration_that_is_not_there_are_unknown() -> None:
    [server] = manifests.servers_of(llm(baseRefs=[{"name": "our-config"}]))
    assert server.args.is_explicit("gpu_memory_utilization") is None
    assert server.args.is_explicit("max_num_seqs") is True


@pytest.mark.parametrize(
    "given", [{"value": "--served-model-name 'open"}, {"valueFrom": {"configMapKeyRef": {"name": "args", "key": "a"}}}]
)
def test_additional_arguments_that_cannot_be_read_hide_the_others(given: dict[str, Any]) -> None:
    service = llm()
    service["spec"]["template"]["containers"][0]["env"] = [{"name": "VLLM_ADDITIONAL_ARGS", **given}]
    [server] = manifests.servers_of(service)
    assert server.args.is_explicit("max_num_seqs") is None


def test_a_runtime_of_another_engine_is_that_engines() -> None:
    [server] = manifests.servers_of(llm(runtime="kserve-llm-sglang", parallelism={"tensor": 2}))
    assert server.dialect == "sglang"
    assert server.args.tensor_parallel_size == 2


def test_what_the_configuration_may_set_is_not_failed(capsys: Capsys, tmp_path: Path) -> None:
    service = llm(parallelism={"tensor": 2})
    service["spec"]["template"]["containers"][0]["livenessProbe"] = {"failureThreshold": 1}
    found = items(capsys, tmp_path, service)
    assert {name: found[name]["result"] for name in ("cpu_limit", "shared_memory", "start_time")} == {
        "cpu_limit": "pass",
        "shared_memory": "cannot see",
        "start_time": "cannot see",
    }


def test_a_configuration_with_its_own_command_is_an_ordinary_template() -> None:
    config = llm()
    config["kind"] = "LLMInferenceServiceConfig"
    config["spec"]["template"]["containers"][0] |= {
        "command": ["vllm", "serve", "/mnt/models"],
        "args": ["--max-num-seqs", "32"],
    }
    [server] = manifests.servers_of(config)
    assert server.args.max_num_seqs == 32
    assert server.command_length == 3


def test_mitigation_names_the_variable_instead_of_a_patch_that_would_not_reach() -> None:
    [server] = manifests.servers_of(llm())
    with pytest.raises(
        InputError, match=r"no command line, the image sets it .*VLLM_ADDITIONAL_ARGS in the container's env"
    ):
        patches.as_patch(server, {"max_num_seqs": 32})
