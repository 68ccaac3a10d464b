"""What is found in each pod of ``tests/fixtures/pods``: written from the manifests' meaning in ``expected.yaml``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.engines.registry import dialect
from kvpressure.model.pools import are_pair, pool_of
from kvpressure.model.readings import GpuOwner
from kvpressure.sources.kubernetes.device_ids import is_accelerator
from kvpressure.sources.kubernetes.discovery import NO_TARGET, REASONS, SIGNS, workload_of
from kvpressure.sources.kubernetes.pod import Pod, discovered, groups_of_workers, leaders
from kvpressure.sources.kubernetes.podresources import of_engines
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.sources.kubernetes import objects

PODS = Path(__file__).parents[2] / "fixtures" / "pods"
EXPECTED: Mapping[str, Any] = yaml.safe_load((PODS / "expected.yaml").read_text())
NO_SECRETS_PARSED = ("kv_role",)  # inside a JSON argument


def document(name: str) -> dict[str, Any]:
    return json.loads((PODS / name).read_text())


def read(name: str) -> Pod:
    return read_pod(document(name), Policy())


def cases(part: str) -> list[tuple[str, str, Any]]:
    return [(pod, name, value) for pod, said in EXPECTED["pods"].items() for name, value in said.get(part, {}).items()]


def test_every_fixture_has_an_expectation() -> None:
    assert {str(path.relative_to(PODS)) for path in PODS.rglob("*.json")} == set(EXPECTED["pods"])


@pytest.mark.parametrize(("name", "container", "expected"), cases("engines"))
def test_engine_is_found(name: str, container: str, expected: Mapping[str, Any]) -> None:
    engine = next((one for one in read(name).engines if one.container == container), None)

    assert engine is not None, "not taken for an engine"
    if expected["port"] is None:
        assert engine.target is None
        assert engine.refusal not in (None, "no_endpoint")
        return
    assert engine.target is not None, engine.refusal
    target = engine.target
    assert (target.port, target.path, target.scheme) == (expected["port"], expected["path"], expected["scheme"])
    args = dialect(engine.dialect).read_command(target.args, target.env).args
    for key, value in expected["arguments"].items():
        if key in NO_SECRETS_PARSED:
            continue
        read_value = args.values.get(key)
        if read_value is None and key in expected.get("may_be_unknown", ()):
            continue
        assert read_value == str(value), key


@pytest.mark.parametrize(("name", "container", "why"), cases("not_engines"))
def test_other_containers_are_not_engines(name: str, container: str, why: str) -> None:
    found = next((one for one in read(name).engines if one.container == container), None)

    assumed = found is not None and all(target.assumed for target in found.targets)
    assert found is None or found.refusal == "no_endpoint" or assumed, why


REASONS_OF = {
    "dynamo/frontend.json": "no_gpu",
    "dynamo/planner.json": "no_gpu",
    "kaito/distributed-1.json": "worker",
    "llm-d/fma-launcher.json": "image",  # assumed: it has the image and a GPU, and never answers
    "llm-d/fma-requester.json": "no_sign",
    "nim/nim-llm.json": "image",
    "skypilot/service.json": "no_sign",
    "variants/gpu-tgi.json": "other_server",
    "variants/gpu-training.json": "no_sign",
    "variants/uds.json": "unix_socket",
    "variants/port-configmap.json": "port_unknown",
    "variants/port-envfrom.json": "port_unknown",
    "variants/host-network-annotated.json": "port_of_the_node",
}


@pytest.mark.parametrize(("name", "reason"), REASONS_OF.items())
def test_the_reason_is_given(name: str, reason: str) -> None:
    assert [row.why for row in read(name).rows] == [reason]


NIM_OF_TEXT = ("nvidia/llama-3.1-nemotron-safety-guard-8b-v3", "meta/llama-3.1-8b-instruct", "nvidia/cosmos-reason1-7b")
OTHER_NIM = (
    *("nvidia/nv-embedqa-e5-v5", "nvidia/llama-nemotron-rerank-1b-v2", "nvidia/nemoretriever-parse"),
    *("nvidia/parakeet-1-1b-ctc-en-us", "deepmind/alphafold2-multimer", "openfold/openfold2", "nvidia/audio2face-3d"),
    "nvidia/cosmos-predict1-7b-text2world",
)


def test_a_nim_that_serves_no_language_model_is_named() -> None:
    nim = document("nim/nim-llm.json")
    for image in (*NIM_OF_TEXT, *OTHER_NIM):
        nim["spec"]["containers"][0]["image"] = f"nvcr.io/nim/{image}:1.0"
        assert [row.why for row in read_pod(nim, Policy()).rows] == ["nim" if image in OTHER_NIM else "image"], image


def test_every_gpu_container_has_a_row_of_the_closed_sets() -> None:
    for name in EXPECTED["pods"]:
        pod = read(name)
        rows = {row.container for row in pod.rows}
        with_gpu = {
            c["name"]
            for c in document(name)["spec"]["containers"]
            if any(is_accelerator(key) for key in c.get("resources", {}).get("limits", {}))
        }
        assert with_gpu | {engine.container for engine in pod.engines} <= rows, name
        assert {row.why for row in pod.rows} <= {*SIGNS, *REASONS, *NO_TARGET}, name


@pytest.mark.parametrize("group", EXPECTED["groups"], ids=lambda group: str(group["engine"]))
def test_workers_are_joined_to_their_leader(group: Mapping[str, Any]) -> None:
    leader, members = read(group["engine"]), [read(name) for name in group["members"]]
    place = (leader.namespace, leader.name, group["container"])
    assert leaders([leader, *members]) == {(member.namespace, member.name): place for member in members}
    assert leaders(members) == {}
    (name,) = set(map(name_of_group, [group["engine"], *group["members"]]))
    (engine,) = (one for one in leader.engines if one.container == group["container"])
    assert {target.group for target in engine.targets} == {name}
    assert groups_of_workers(members) == {(member.namespace, member.name): name for member in members}, "on other nodes"
    for row in discovered(members):
        assert row.explanation == f"a worker of an engine that another pod serves ({name})"


def name_of_group(pod: str) -> str:
    """As the labels say it: who makes the group, and the values that its pods share."""
    labels = document(pod)["metadata"]["labels"]
    if "kaito.sh/workspace" in labels:
        return f"KAITO/{labels['kaito.sh/workspace']}"
    if "ray.io/cluster" in labels:
        return f"RayCluster/{labels['ray.io/cluster']}"
    prefix = "leaderworkerset.sigs.k8s.io"
    return f"LeaderWorkerSet/{labels[f'{prefix}/name']}/{labels[f'{prefix}/group-index']}"


def test_pods_with_metrics_of_their_own_are_not_joined() -> None:
    for group in EXPECTED["not_grouped"]:
        pods = list(map(read, group["pods"]))
        assert leaders(pods) == {}
        assert groups_of_workers(pods) == {}


def test_gpus_of_a_worker_are_its_leaders_here_and_else_named_with_the_group() -> None:
    leader, worker = read("lws/vllm-leader.json"), read("lws/vllm-worker.json")
    held = [GpuOwner("GPU-9", worker.namespace, worker.name, "vllm-worker")]
    assert of_engines(held, [leader, worker]) == [GpuOwner("GPU-9", leader.namespace, leader.name, "vllm-leader")]
    assert of_engines(held, [worker]) == [
        GpuOwner("GPU-9", worker.namespace, worker.name, "vllm-worker", group="LeaderWorkerSet/vllm/0")
    ]


def container_of_image(image: str, **container: Any) -> dict[str, Any]:
    """A running pod of one container, as the API server shows it."""
    return {
        "metadata": {"namespace": "n", "name": "p", "uid": "1"},
        "spec": {"containers": [{"name": "c", "image": image, **container}]},
        "status": {"phase": "Running", "podIP": "10.0.0.7"},
    }


def test_the_exporter_takes_no_other_program_that_serves_for_an_engine_least_of_all_itself() -> None:
    """The word ``serve`` for an image's entry point is that of many programs."""
    pod = read_pod(
        container_of_image(
            "registry.internal/kvpressure:0.1.0",
            args=["serve", "--config", "/etc/kvpressure/config.yaml"],
            ports=[{"containerPort": 9846}],
        ),
        Policy(),
    )
    assert (pod.engines, pod.rows) == ((), ())


# --- engines of several pods ----------------------------------------------------------------------------------------

LWS_LABELS, RBG, STORM_LABELS, KTHENA_LABELS = (
    "leaderworkerset.sigs.k8s.io/",
    "rbg.workloads.x-k8s.io/",
    "stormservice.orchestration.aibrix.ai/",
    "modelserving.volcano.sh/",
)
IF = (
    'if [ "$LWS_WORKER_INDEX" = "0" ]; then vllm serve m --port 8100;'
    " else ray start --address=$LWS_LEADER_ADDRESS:6379 --block; fi"
)
SYMMETRIC = "ray symmetric-run --address $LWS_LEADER_ADDRESS:6379 --min-nodes 2 -- vllm serve m -tp 16 --port 8100"
EXAMPLE = "bash /vllm-workspace/examples/online_serving/multi-node-serving.sh"
HEADLESS = "vllm serve m -dp 16 -dpl 8 -dpr $((8 * LWS_WORKER_INDEX)) -dpa $LWS_LEADER_ADDRESS --port 8100"
RANKS = "vllm serve m -tp 8 -pp 2 --port 8100 --nnodes 2 --node-rank $RANK --master-addr"
SGLANG_RANKS = "python3 -m sglang.launch_server --model-path m --tp 16 --enable-metrics --port 8100 --nnodes 2"
DYNAMO_RANKS = "python3 -m dynamo.sglang --model-path m --tp-size 16 --nnodes 2"
LWS_ENV = {"LWS_LEADER_ADDRESS": "chat-0.chat.inference", "DYN_SYSTEM_PORT": "8100"}
RAY_JOIN = (
    "while true; do if ray health-check --address $HEAD_SVC.$NS.svc:6379; then"
    " ray start --address=$HEAD_SVC.$NS.svc:6379 --block; fi; done"
)
HUGGING_FACE = "ray start --head\nexec python -m huggingfaceserver --http_port 8100 --pipeline-parallel-size=2"


def lws(index: int) -> dict[str, str]:
    return {LWS_LABELS + "name": "chat", LWS_LABELS + "group-index": "0", LWS_LABELS + "worker-index": str(index)}


def ray(node: str) -> dict[str, str]:
    return {"ray.io/cluster": "chat", "ray.io/node-type": node}


def rbg(component: str) -> dict[str, str]:
    return {RBG + "role-instance-name": "chat-0", RBG + "component-name": component}


def podset(index: int) -> dict[str, str]:
    return {STORM_LABELS + "podset-name": "chat-0", STORM_LABELS + "pod-group-index": str(index)}


def kserve(app: str) -> dict[str, str]:
    return {"serving.kserve.io/inferenceservice": "chat", "app": f"isvc.{app}"}


KTHENA_ROLE = {KTHENA_LABELS + "group-name": "chat-0", KTHENA_LABELS + "role-id": "prefill-0"}
Member = tuple[str, dict[str, str], str]  # name, labels, script
FORMS: dict[str, tuple[str, Member, Member]] = {  # the name of the group, its leader, a worker
    **{
        form: (
            "LeaderWorkerSet/chat/0",
            ("chat-0", lws(0), script.replace("$LWS_WORKER_INDEX", "0")),
            ("chat-0-1", lws(1), script.replace("$LWS_WORKER_INDEX", "1")),
        )
        for form, script in {"if": IF, "symmetric-run": SYMMETRIC}.items()
    },
    "index hidden": ("LeaderWorkerSet/chat/0", ("chat-0", lws(0), IF), ("chat-0-1", lws(1), IF)),
    "data-parallel ranks": (
        "LeaderWorkerSet/chat/0",
        ("chat-0", lws(0), HEADLESS),
        ("chat-0-1", lws(1), f"{HEADLESS} --headless"),
    ),
    "RayCluster": (
        "RayCluster/chat",
        ("chat-head", ray("head"), "ray start --head; vllm serve m --port 8100"),
        ("chat-w-1", ray("worker"), "ray start --address=chat-head-svc:6379"),
    ),
    "RoleBasedGroup": (
        "RoleBasedGroup/chat-0",
        ("chat-0", rbg("leader"), f"{SGLANG_RANKS} --node-rank 0 --dist-init-addr $LWS_LEADER_ADDRESS:5000"),
        ("chat-0-1", rbg("worker"), f"{SGLANG_RANKS} --node-rank 1 --dist-init-addr $LWS_LEADER_ADDRESS:5000"),
    ),
    "Kthena": (
        "ModelServing/chat-0/prefill-0",
        ("chat-0-0", {**KTHENA_ROLE, KTHENA_LABELS + "entry": "true"}, f"{EXAMPLE} leader; vllm serve m --port 8100"),
        ("chat-0-1", KTHENA_ROLE, f"{EXAMPLE} worker --ray_address=$ENTRY_ADDRESS"),
    ),
    "AIBrix PodSet": (
        "PodSet/chat-0",
        ("chat-0-0", podset(0), f"{RANKS.replace('$RANK', '0')} $PODSET_LEADER"),
        ("chat-0-1", podset(1), f"{RANKS.replace('$RANK', '1')} $PODSET_LEADER --headless"),
    ),
    "Dynamo with Grove": (
        "leader/chat-0",
        ("chat-0", {}, f"{DYNAMO_RANKS} --node-rank 0 --dist-init-addr $LWS_LEADER_ADDRESS:29500"),
        ("chat-wkr-0", {}, f"{DYNAMO_RANKS} --node-rank 1 --dist-init-addr=$LWS_LEADER_ADDRESS:29500"),
    ),
    "KServe and RHOAI": (
        "InferenceService/chat",
        ("chat-predictor-7d9f-x", kserve("chat-predictor"), HUGGING_FACE),
        ("chat-predictor-worker-0", kserve("chat-predictor-worker"), RAY_JOIN),
    ),
    "StatefulSet": (
        "leader/chat-0",
        ("chat-0", {}, f"{RANKS.replace('$RANK', '0')} chat-0.chat.$NS.svc.cluster.local"),
        ("chat-1", {}, f"{RANKS.replace('$RANK', '1')} chat-0.chat.$NS.svc.cluster.local"),
    ),
    "StatefulSet whose rank is hidden": (
        "leader/chat-0",
        ("chat-0", {}, f"{RANKS} $LWS_LEADER_ADDRESS"),
        ("chat-1", {}, f"{RANKS} $LWS_LEADER_ADDRESS"),
    ),
    "leader that names its own address": (
        "leader/chat-0",
        ("chat-0", {}, f"{RANKS.replace('$RANK', '0')} 10.0.0.5"),
        ("chat-1", {}, f"{RANKS.replace('$RANK', '1')} $LWS_LEADER_ADDRESS"),
    ),
}


def member(one: Member) -> Pod:
    name, labels, script = one
    env = [{"name": name, "value": value} for name, value in LWS_ENV.items()]
    image = "lmsysorg/sglang:v0.5.5" if "sglang" in script else "vllm/vllm-openai:v0.11.0"
    server = objects.container("main", image=image, command=["bash", "-c", script], env=env, ports=[])
    return read_pod(objects.pod(name, labels=labels, containers=[server]), Policy())


@pytest.mark.parametrize("form", FORMS)
def test_one_engine_of_several_pods_has_one_target_and_all_their_gpus(form: str) -> None:
    """A follower is never a target: by its label, its rank, the branch it takes, or Ray's worker."""
    name, *pods = FORMS[form]
    leader, worker = map(member, pods)
    assert [target.port for engine in leader.engines for target in engine.targets] == [8100]
    assert [(row.result, row.why) for row in worker.rows] == [("no_target", "no_endpoint")]
    assert {target.group for engine in leader.engines for target in engine.targets} == {name}
    assert leaders([leader, worker]) == {("inference", worker.name): ("inference", leader.name, "main")}
    assert groups_of_workers([leader, worker]) == {("inference", worker.name): name}


@pytest.mark.parametrize(
    "script",
    [
        "vllm serve m --data-parallel-hybrid-lb -dpa chat-0.chat -dpr 8 --port 8100",
        "ray start --address=chat-0:6379; exec vllm serve m --port 8100",
        "vllm serve m -tp 8 --port 8100",
    ],
)
def test_a_server_that_certainly_starts_is_a_target_whatever_its_label_says(script: str) -> None:
    found = member(("chat-0-1", lws(1), script))
    assert [target.port for engine in found.engines for target in engine.targets] == [8100]
    assert groups_of_workers([found]) == {}


# --- what is assumed ------------------------------------------------------------------------------------------------

GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
DECLARED = {"ports": [{"containerPort": 8000}]}


@pytest.mark.parametrize(
    ("container", "assumed"),
    [
        ({"command": ["python", "offline.py"], **DECLARED}, True),
        ({"command": ["bash", "-c", "launch --run 'vllm serve m'"], **DECLARED}, True),
        ({"command": ["bash", "-c", 'if [ -n "$X" ]; then vllm serve m; else work; fi'], **DECLARED}, True),
        ({"command": ["bash", "-c", "vllm serve m $MORE"]}, True),  # its port may be among what is hidden
        ({"command": ["bash", "-c", "vllm serve m $MORE"], **DECLARED}, False),
        ({"command": ["bash", "-c", "pip install x && while true; do vllm serve m; done"]}, False),
        ({"args": ["--model", "m"]}, False),
        ({"args": []}, True),
        *(
            ({"command": words}, True)
            for words in (
                *(["sh", "-c", "$CMD"], ["bash", "-c", "pip install x && tail -f /dev/null"], ["vllm", "$(MODE)"]),
                *(["vllm", "launch", "render"], ["/start.sh"], ["ray", "start", "--head"], ["bash", "-c", "--"]),
                ["exec"],
            )
        ),
    ],
)
def test_what_only_an_image_or_a_text_names_is_assumed_until_it_answers(
    container: dict[str, Any], assumed: bool
) -> None:
    document = container_of_image("vllm/vllm-openai:v0.11.0", **container, **GPU)
    for given, expected in (({}, assumed), ({"kvpressure.io/port": "8000"}, False)):
        document["metadata"]["annotations"] = given
        pod = read_pod(document, Policy())
        (engine,) = pod.engines
        assert (engine.target.assumed, engine.reading.run.assumed) == (expected, expected)


# --- endpoints ------------------------------------------------------------------------------------------------------

DYN_SGLANG = ["python3", "-m", "dynamo.sglang", "--model-path", "m"]
GRPC = ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--grpc-mode", "--port", "8080"]
ENDPOINTS: tuple[tuple[list[str], dict[str, str], tuple[int, ...], str], ...] = (  # command, env, ports, why
    (["vllm", "serve", "m", "--host", "127.0.0.1", "--port", "8001"], {}, (), "loopback_of_container"),
    (["vllm", "serve", "m", "--host=localhost"], {}, (), "loopback_of_container"),
    (["vllm", "serve", "m", "--host", "0.0.0.0", "--port", "8001"], {}, (8001,), "command"),
    (DYN_SGLANG, {"DYN_SYSTEM_PORT": "8081"}, (8081,), "command"),
    (DYN_SGLANG, {}, (), "metrics_off"),
    (GRPC, {}, (), "metrics_off"),
    ([*GRPC, "--enable-metrics"], {}, (8081,), "command"),
    ([*GRPC, "--enable-metrics", "--metrics-http-port", "9100"], {}, (9100,), "command"),
    (["bash", "-c", "vllm serve a --port 8000 & vllm serve b --port 8001 & wait"], {}, (8000, 8001), "command"),
    (["bash", "-c", 'A=(--max-num-seqs 64 --port 9000); vllm serve m "${A[@]}"'], {}, (9000,), "command"),
    (["bash", "-c", "if [ $X = 1 ]; then vllm serve m --port 8001; else vllm serve n; fi"], {}, (), "port_unknown"),
    (["python", "-m", "vllm.entrypoints.cli.main", "serve", "m", "--port", "9000"], {}, (9000,), "command"),
)


@pytest.mark.parametrize(("command", "env", "ports", "why"), ENDPOINTS)
def test_a_target_is_an_address_that_answers_or_there_is_a_reason(
    command: list[str], env: dict[str, str], ports: tuple[int, ...], why: str
) -> None:
    given = [{"name": name, "value": value} for name, value in env.items()]
    pod = read_pod(container_of_image("registry.internal/llm:1", command=command, env=given, **GPU), Policy())
    (engine,) = pod.engines
    assert tuple(target.port for target in engine.targets) == ports
    assert [row.why for row in pod.rows] == [why]


def test_a_proxy_in_front_of_a_loopback_listener_is_the_target_that_an_annotation_names() -> None:
    document = container_of_image("vllm/vllm-openai:v0.11.0", command=["vllm", "serve", "m", "--host", "127.0.0.1"])
    document["metadata"]["annotations"] = {"kvpressure.io/port": "8443", "kvpressure.io/scheme": "https"}
    pod = read_pod(document, Policy())
    assert [target.name for engine in pod.engines for target in engine.targets] == ["https://10.0.0.7:8443/metrics"]


# --- accelerators ---------------------------------------------------------------------------------------------------

OF_A_VENDOR = {  # image of a wrapper -> what it asks for, as its vendor's device plugin names it
    "rocm/vllm:latest": {"amd.com/cpx_nps4": 1},
    "rocm/sgl-dev:v0.5.5-rocm700": {"amd.com/spx_nps1": 8},
    "projecthami/vllm-openai:v0.11.0": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 50},
    "vllm/vllm-openai:v0.11.0": {"nvidia.com/mig-1g.10gb.shared": 1},
    "vllm/vllm-tpu:v0.11.1": {"google.com/tpu": 8},
    "vault.habana.ai/gaudi-docker/vllm-installer:1.22": {"habana.ai/gaudi": 8},
    "public.ecr.aws/neuron/pytorch-inference-vllm-neuronx:0.11": {"aws.amazon.com/neuroncore": 2},
    "quay.io/ascend/vllm-ascend:v0.11.0": {"huawei.com/Ascend910": 4},
    "quay.io/ibm-aiu/vllm-spyre:latest": {"ibm.com/spyre_pf": 4},
}
NETWORK = {"nvidia.com/hostdev": "1", "nvidia.com/rdma_host_dev": "1", "amd.com/nic": "1", "rdma/hca": "1", "cpu": "8"}


@pytest.mark.parametrize(("image", "asked"), OF_A_VENDOR.items())
def test_accelerators_are_known_by_their_vendor_and_named_as_they_are_asked_for(
    image: str, asked: Mapping[str, int]
) -> None:
    limits = NETWORK | {name: str(count) for name, count in asked.items()}
    for other, why in ((image, "image"), ("registry.internal/llm:1", "no_sign")):
        pod = read_pod(container_of_image(other, command=["/start.sh"], resources={"limits": limits}), Policy())
        assert [(row.why, row.gpus) for row in pod.rows] == [(why, asked)]
    pod = read_pod(container_of_image(image, command=["/start.sh"], resources={"limits": NETWORK}), Policy())
    assert [(row.why, row.gpus) for row in pod.rows] == [("no_gpu", {})]


POOLS = {  # pool, role, and what gave it
    "llm-d/modelservice-prefill.json": ("pd-llm-d-modelservice-prefill", "prefill", "label"),
    "llm-d/wide-ep-leader.json": ("wide-ep-llm-d-decode", "decode", "label"),
    "kserve/llmisvc-decode.json": ("llama-kserve-decode", "decode", "label"),
    "kserve/llmisvc-template.json": ("llama-kserve", "", "owner"),
    "production-stack/prefill.json": ("vllm-llama-prefill-deployment-vllm", "prefill", "args"),
    "production-stack/decode.json": ("vllm-llama-decode-deployment-vllm", "decode", "args"),
    "aibrix/stormservice-prefill.json": ("vllm-1p1d-roleset-prefill", "prefill", "name"),
    "aibrix/stormservice-decode.json": ("vllm-1p1d-roleset-decode", "decode", "name"),
    "aibrix/deployment.json": ("deepseek-r1-distill-llama-8b", "", "owner"),
    "lws/vllm-leader.json": ("vllm", "", "owner"),
    "ray-serve-llm/worker.json": ("ray-serve-llm", "", "owner"),
    "skypilot/service-annotated.json": ("vllm-2b-head", "", "name"),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool_of_the_pods_of_each_project(name: str) -> None:
    """``kv_both`` of llm-d and AIBrix is no role, and of a Deployment the pool is the Deployment."""
    (pool,) = {target.pool for engine in read(name).engines for target in engine.targets}
    assert (pool.name, pool.role, pool.source) == POOLS[name]


VLLM, SGLANG = ["vllm", "serve", "org/model"], ["python3", "-m", "sglang.launch_server", "--model-path", "org/model"]
DYNAMO = ["python3", "-m", "dynamo.vllm", "--model", "org/model", "--disaggregation-mode", "prefill"]
CONSUMER = [*VLLM, "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}']
STORM = {"storm-service-name": "chat", "roleset-name": "chat-x7k"}
KTHENA = {"modelserving.volcano.sh/name": "chat", "modelserving.volcano.sh/role": "decode"}
GRAPH = {"nvidia.com/dynamo-graph-deployment-name": "chat", "nvidia.com/dynamo-sub-component-type": "prefill"}
LWS = {"leaderworkerset.sigs.k8s.io/name": "chat-decode", "disaggregatedset.x-k8s.io/role": "decode"}
ROLLOUT = {"rollouts-pod-template-hash": "5d8b7c6f9"}
RBG_DECODE = {"rbg.workloads.x-k8s.io/role-name": "decode"}
CRAFTED: tuple[tuple[str, str, dict[str, str], list[str], tuple[str, str, str]], ...] = (
    # pods of several roles under one owner: the pool has the role's name
    ("chat-a-0", "RoleSet/chat-x7k", {**STORM, "role-name": "prefill"}, VLLM, ("chat-prefill", "prefill", "label")),
    ("chat-a-1", "RoleSet/chat-x7k", {**STORM, "role-name": "master"}, VLLM, ("chat", "", "owner")),
    ("chat-0-b-0", "ModelServing/chat", KTHENA, VLLM, ("chat-decode", "decode", "label")),
    ("chat-0-w-x4c9d", "PodClique/chat-0-w", GRAPH, DYNAMO, ("chat-prefill", "prefill", "label")),
    ("chat-0-w-x4c9d", "PodClique/chat-0-w", {}, DYNAMO, ("chat-0-w-prefill", "prefill", "args")),
    ("chat-w-0", "StatefulSet/chat-w", RBG_DECODE, VLLM, ("chat-w", "decode", "label")),
    ("chat-0", "StatefulSet/chat", LWS, VLLM, ("chat-decode", "decode", "label")),
    ("chat-1", "StatefulSet/chat", {"component": "decoder"}, VLLM, ("chat", "decode", "label")),
    ("chat-2", "StatefulSet/chat", {"llm-d.ai/role": "prefill-decode"}, VLLM, ("chat", "both", "label")),
    ("chat-d-5d8b7c6f9-q7r8s", "ReplicaSet/chat-d-5d8b7c6f9", ROLLOUT, CONSUMER, ("chat-d", "decode", "args")),
    ("chat-3", "StatefulSet/chat", {}, [*SGLANG, "--disaggregation-mode", "prefill"], ("chat", "prefill", "args")),
    ("chat-4", "StatefulSet/chat", {}, SGLANG, ("chat", "", "owner")),
    # what contradicts itself is unknown; the weaker word of a name is not asked
    ("prefill-5", "StatefulSet/prefill", {"llm-d.ai/role": "prefill"}, CONSUMER, ("prefill", "", "owner")),
    ("prefill-6", "StatefulSet/prefill", {}, CONSUMER, ("prefill", "decode", "args")),
    ("prefill-decode-0", "StatefulSet/prefill-decode", {}, VLLM, ("prefill-decode", "", "owner")),
    ("prefill-7", "", {}, VLLM, ("prefill-7", "prefill", "name")),
    ("chat-gpu-1", "Node/gpu-1", {}, VLLM, ("chat-gpu-1", "", "name")),
)


@pytest.mark.parametrize(("name", "owner", "labels", "command", "pool"), CRAFTED)
def test_pool_by_owner_labels_arguments_and_name(
    name: str, owner: str, labels: dict[str, str], command: list[str], pool: tuple[str, str, str]
) -> None:
    """Labels from the sources of the orchestrators, of which no pod is among the fixtures."""
    server = objects.container(command=command, env=[{"name": "DYN_SYSTEM_PORT", "value": "8000"}])
    kind, _, of = owner.partition("/")
    document = objects.pod(name, owner=(kind, of) if owner else None, labels=labels, containers=[server])
    ((target,),) = (engine.targets for engine in read_pod(document, Policy()).engines)
    assert (target.pool.name, target.pool.role, target.pool.source) == pool


OME = {"ome.io/inferenceservice": "chat"}
OF_RBG = {"rbg.workloads.x-k8s.io/group-name": "chat"}


@pytest.mark.parametrize(
    ("prefill", "decode", "of_one"),
    [
        ("chat-prefill", "chat-decode", True),
        ("chat-kserve-prefill", "chat-kserve", True),
        ("chat-p", "chat-d", True),
        ("graph-vllmprefillworker", "graph-vllmdecodeworker", True),
        ("chat-engine", "chat-decoder", False),
        (("chat-engine", OME), ("chat-decoder", OME), True),
        (("a", OF_RBG), ("b", OF_RBG), True),
        (("chat-prefill", OF_RBG), ("chat-decode", {**OF_RBG, "rbg.workloads.x-k8s.io/group-name": "test"}), False),
        ("chat-prefill", "test-decode", False),
        ("chat-p", "test-d", False),
    ],
)
def test_prefill_and_decode_are_a_pair_by_their_object_else_by_their_names(
    prefill: str | tuple[str, dict[str, str]], decode: str | tuple[str, dict[str, str]], of_one: bool
) -> None:
    """The roles are those of the arguments."""
    pools = []
    for side, kv_role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        name, labels = (side, {}) if isinstance(side, str) else side
        owner = {"controller": True, "kind": "StatefulSet", "name": name}
        pools.append(pool_of(f"{name}-0", workload_of({"labels": labels, "ownerReferences": [owner]}), kv_role))
    assert are_pair(*pools) is are_pair(*reversed(pools)) is of_one
    assert not are_pair(pools[0], pools[0])
