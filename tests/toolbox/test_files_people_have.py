"""``discover`` and ``audit`` on Compose files and LLMInferenceServices as projects publish them, and on kinds that only
their controllers read: the engine with its arguments, or the kind by name and exit status 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.command import Capsys, answer, refused, run
from tests.toolbox.test_discovering import written

TWO = "{resources: {reservations: {devices: [{driver: nvidia, device_ids: ['0', '1'], capabilities: [gpu]}]}}}"


def found(capsys: Capsys, tmp_path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """The containers of one document by pod and container."""
    rows: Any = answer(capsys, "discover -f", written(tmp_path, document))[1]
    return {f"{row['pod']}/{row['container']}": row for row in rows}


def given(row: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: one["value"] for name, one in row["arguments"].items() if one["source"] == "args"}


SERVICES = f"""
one text, as most write it:
  service:
    image: vllm/vllm-openai:v0.11.2
    command: |
      --model Qwen/Qwen3-8B
        --max-num-seqs 64 --gpu-memory-utilization 0.98
    ports: ['80:8000']
    deploy: {{resources: {{reservations: {{devices: [{{driver: nvidia, count: all, capabilities: [gpu]}}]}}}}}}
  given: {{model: Qwen/Qwen3-8B, max_num_seqs: '64', gpu_memory_utilization: '0.98'}}
  gpus: {{claims: 1}}
a list, and GPUs by their ids:
  service:
    image: vllm/vllm-openai:latest
    command: [--model, /models/m, --max-num-seqs, '2', --port, '9000', -tp, 2]
    deploy: {TWO}
  given: {{model: /models/m, max_num_seqs: '2', port: '9000', tensor_parallel_size: '2'}}
  gpus: {{nvidia.com/gpu: 2}}
  port: 9000
the program is the entry point's, and the image somebody's own:
  service:
    image: registry.example/llm
    entrypoint: python3 -m sglang.launch_server
    command: --model-path m --max-running-requests 32 --enable-metrics
    gpus: all
  given: {{model: m, max_num_seqs: '32', enable_metrics: 'True'}}
  gpus: {{claims: 1}}
  port: 30000
a script, with a variable of the container:
  service:
    image: vllm/vllm-openai
    entrypoint: [bash, -c, exec vllm serve m --max-num-seqs $$SEQS]
    environment: {{SEQS: 48}}
    gpus: [{{count: 1}}]
  given: {{model: m, max_num_seqs: '48'}}
  gpus: {{nvidia.com/gpu: 1}}
what Compose fills in is not in the file, here one value:
  service: {{image: lmsysorg/sglang, command: python3 -m sglang.launch_server --model-path m --dtype $T}}
  given: {{model: m, dtype: null}}
  gpus: {{}}
  port: 30000
  complete: false
and here more options:
  service:
    image: ${{IMAGE:-vllm/vllm-openai:latest}}
    command: --model ${{MODEL:-m}} --max-num-seqs 64 ${{MORE}}
    environment: [HF_TOKEN, 'HF_HOME=${{HOME}}']
    runtime: nvidia
  given: {{max_num_seqs: '64', model: null}}
  gpus: {{claims: 1}}
  complete: false
"""


@pytest.mark.parametrize("case", [pytest.param(one, id=name) for name, one in yaml.safe_load(SERVICES).items()])
def test_a_service_of_a_compose_file(case: dict[str, Any], capsys: Capsys, tmp_path: Path) -> None:
    services = {"llm": case["service"], "web": {"image": "nginx", "ports": ["80:80"]}}
    rows = found(capsys, tmp_path, {"services": services, "volumes": {"hf": None}})
    assert list(rows) == ["llm/llm"]
    row = rows["llm/llm"]
    assert (row["result"], given(row), row["gpus"]) == ("engine", case["given"], case["gpus"])
    assert row["complete"] is case.get("complete", True)
    assert row["address"] == f"http://<container IP>:{case.get('port', 8000)}/metrics"


def test_a_value_that_is_not_in_the_file_is_not_called_visible(capsys: Capsys, tmp_path: Path) -> None:
    service = {"image": "vllm/vllm-openai", "command": "--model m --max-num-seqs ${SEQS:-64}"}
    out = run(capsys, "discover -f", written(tmp_path, {"services": {"llm": service}}))[1]
    assert "arguments: partly visible\n" in out
    assert "max_num_seqs: not visible (args)\n" in out


def test_every_engine_of_a_compose_file_is_audited(capsys: Capsys, tmp_path: Path) -> None:
    image = "vllm/vllm-openai:v0.11.2"
    services = {
        name: {"image": image, "command": f"--model m --gpu-memory-utilization {share}", "deploy": yaml.safe_load(TWO)}
        for name, share in (("chat", 0.97), ("code", 0.6))
    }
    status, document = answer(capsys, "audit", written(tmp_path, {"name": "prod", "services": services}))
    assert status == 1
    utilization = {
        server["server"]: next(item["result"] for item in server["items"] if item["name"] == "gpu_memory_utilization")
        for server in document["servers"]
    }
    assert utilization == {"prod/chat:chat": "info", "prod/code:code": "pass"}


def llmisvc(**spec: Any) -> dict[str, Any]:
    model = {"uri": "hf://Qwen/Qwen2.5-7B-Instruct", "name": "qwen"}
    named = {"kind": "LLMInferenceService", "metadata": {"name": "llama", "namespace": "llm"}}
    return {"apiVersion": "serving.kserve.io/v1alpha2", **named, "spec": {"model": model, "router": {}, **spec}}


def main(words: str = "", gpus: int = 1) -> dict[str, Any]:
    environment = [{"name": "VLLM_ADDITIONAL_ARGS", "value": words}] if words else []
    container = {"name": "main", "env": environment, "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"containers": [container]}


def test_an_inference_service_of_kserve(capsys: Capsys, tmp_path: Path) -> None:
    """Its controller writes the command, so what is not set stays unknown."""
    words = '--max-num-seqs 64 --kv_transfer_config \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\''
    pair = llmisvc(
        template=main(words),
        parallelism={"tensor": 2},
        prefill={"parallelism": {"tensor": 4}, "template": main(gpus=4)},
    )
    rows = found(capsys, tmp_path, pair)
    decode, prefill = rows["llama/main"], rows["llama-prefill/main"]
    assert (decode["role"], prefill["role"], decode["group"] != prefill["group"]) == ("decode", "prefill", True)
    assert (given(decode)["max_num_seqs"], given(decode)["tensor_parallel_size"]) == ("64", "2")
    assert (given(prefill)["tensor_parallel_size"], "max_num_seqs" in given(prefill)) == ("4", False)
    assert (decode["complete"], prefill["gpus"]) == (False, {"nvidia.com/gpu": 4})
    assert (decode["address"][-13:], prefill["address"][-13:]) == (":8001/metrics", ":8000/metrics")


def test_workers_of_an_inference_service_are_no_targets(capsys: Capsys, tmp_path: Path) -> None:
    document = llmisvc(template=main(gpus=8), worker=main(gpus=8), parallelism={"data": 16, "dataLocal": 8})
    rows: Any = answer(capsys, "discover -f", written(tmp_path, document))[1]
    assert [row["reason"] for row in rows] == ["command", "no_endpoint"]
    assert len({row["group"] for row in rows}) == 1, "one engine"


def test_an_inference_service_on_sglang_or_with_its_own_command(capsys: Capsys, tmp_path: Path) -> None:
    own = {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.11.2", "command": ["vllm", "serve", "m"]}]}
    assert found(capsys, tmp_path, llmisvc(template=own))["llama/main"]["complete"] is True
    sglang = found(capsys, tmp_path, llmisvc(runtime="kserve-llm-sglang"))["llama/main"]
    assert (sglang["complete"], given(sglang)["model"]) == (False, "Qwen/Qwen2.5-7B-Instruct")


UNREAD = """
apiVersion: ray.io/v1
kind: RayService
metadata: {name: llm}
spec:
  serveConfigV2: "applications:\\n- args: {llm_configs: [{engine_kwargs: {gpu_memory_utilization: 0.97}}]}"
  rayClusterConfig:
    headGroupSpec: {template: {spec: {containers: [{name: ray-head, image: rayproject/ray-llm}]}}}
---
apiVersion: kaito.sh/v1beta1
kind: Workspace
metadata: {name: phi}
inference: {preset: {name: phi-4-mini-instruct}, config: phi-config}
---
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: disagg}
spec: {services: {Worker: {extraPodSpec: {mainContainer: {args: [python3 -m dynamo.vllm]}}}}}
---
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: llama}
spec: {predictor: {model: {modelFormat: {name: huggingface}, args: [--model_name=llama]}}}
---
{apiVersion: kubeai.org/v1, kind: Model, metadata: {name: l}, spec: {engine: VLLM, args: []}}
"""
BESIDE: list[dict[str, Any]] = [
    *yaml.safe_load_all("""
{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: vllm}, spec: {hosts: [vllm]}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: vllm}
spec: {scaleTargetRef: {name: vllm}, triggers: [{metadata: {query: 'vllm:num_requests_waiting'}}]}
---
{apiVersion: inference.networking.x-k8s.io/v1, kind: InferencePool, metadata: {name: vllm}}
""")
]
CHAT: dict[str, Any] = yaml.safe_load("""
kind: Deployment
metadata: {name: chat}
spec:
  template:
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.11.2
        args: [--model=m, --gpu-memory-utilization=0.6, --max-num-seqs=8, --max-model-len=8192]
""")


@pytest.mark.parametrize("document", list(yaml.safe_load_all(UNREAD)), ids=lambda document: str(document["kind"]))
def test_a_kind_that_only_its_controller_reads_is_named(
    document: dict[str, Any], capsys: Capsys, tmp_path: Path
) -> None:
    named = f"{document['kind']} {document['metadata']['name']}"
    for command in ("audit", "discover -f"):
        status, _, err = run(capsys, command, written(tmp_path, document))
        assert (status, named in err) == (2, True)
    status, _, err = run(capsys, "audit", written(tmp_path, document, *BESIDE, CHAT))
    assert status in (1, 2)
    assert named in err
    assert "vllm" not in err, "what cannot hold an engine is not named"


def test_what_cannot_hold_an_engine_changes_no_status(capsys: Capsys, tmp_path: Path) -> None:
    assert run(capsys, "discover -f", written(tmp_path, *BESIDE, CHAT))[::2] == (0, "")


@pytest.mark.parametrize("command", ["discover -f", "audit"])
def test_a_file_without_an_engine_is_no_pass(command: str, capsys: Capsys, tmp_path: Path) -> None:
    config = {"kind": "ConfigMap", "metadata": {"name": "phi"}, "data": {"inference_config.yaml": "vllm:"}}
    assert "ConfigMap phi" in refused(capsys, command, written(tmp_path, config))
    beside = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in BESIDE)
    assert beside in refused(capsys, command, written(tmp_path, *BESIDE))
    assert "service web" in refused(capsys, command, written(tmp_path, {"services": {"web": {"image": "nginx"}}}))
