"""Engines, targets and container readings out of pod objects, friendly and hostile ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvpressure.engines.vllm import command_line
from kvpressure.model.readings import Run, Termination
from kvpressure.parsed import quantity
from kvpressure.sources.kubernetes.command_lines import CommandLines
from kvpressure.sources.kubernetes.podspec import EngineContainer, Pod, Policy, read_pod
from kvpressure.sources.kvevents.addresses import EventsEndpoint
from kvpressure.sources.scrape.targets import Target
from tests.engines.vllm.crafted import UNITS, repeated, within
from tests.sources.kubernetes.objects import container, container_id, of_static_pod, pod

pytestmark = pytest.mark.slow

ALL = Policy()
SELECTED = Policy(selected=True)


def read(document: dict[str, Any], policy: Policy = ALL) -> Pod:
    return read_pod(document, policy)


def engine(document: dict[str, Any], policy: Policy = ALL) -> EngineContainer:
    engines = read(document, policy).engines
    assert len(engines) == 1
    return engines[0]


def target(document: dict[str, Any], policy: Policy = ALL) -> Target:
    return engine(document, policy).target


def test_a_plain_engine() -> None:
    found = read(pod(restarts=3, last={"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-02T03:04:05Z"}))
    assert (found.namespace, found.name, found.phase) == ("inference", "vllm-0", "Running")
    one = found.engines[0]
    assert one.target.name == "http://10.0.0.5:8000/metrics"
    assert (one.target.namespace, one.target.pod, one.target.container) == ("inference", "vllm-0", "vllm")
    assert one.target.args == ("vllm", "serve", "--max-num-seqs=64", "--model=org/model")
    assert one.container_id == container_id("inference", "vllm-0", "vllm", 3)
    assert found.containers == {one.container_id: "vllm"}
    reading = one.reading
    assert (reading.restarts, reading.ready) == (3, True)
    assert reading.last_termination == Termination("OOMKilled", 137, 1767323045.0)
    assert (reading.cpu_limit_cores, reading.memory_limit_bytes) == (8.0, 64 * 2**30)


IMAGE = "vllm/vllm-openai:v0.32.0"


@pytest.mark.attack("an image with vLLM in its name that runs something else", "no engine before it answers")
def test_a_program_without_a_gpu_is_no_engine_because_its_text_speaks_of_one() -> None:
    for words in ("until pgrep -f 'vllm serve'; do sleep 1; done", "echo vllm.entrypoints", "sleep infinity"):
        other = container(command=["bash", "-c", words], resources={})
        assert read(pod(containers=[other])).engines == ()
        assert [e.container for e in read(pod(containers=[{**other, "name": "side"}, container()])).engines] == ["vllm"]


@pytest.mark.parametrize("declared", [(8001,), (8001, 8000), ()])
def test_the_port_annotation_is_of_one_engine(declared: tuple[int, ...]) -> None:
    other = container("b", command=["vllm", "serve", "n", "--port", "8001"], ports=ports(*declared))
    found = read(pod(containers=[other, container("a")], annotations={"prometheus.io/port": "8000"}))
    assert {e.container: (e.target.port, e.refusal) for e in found.engines} == {"b": (8001, None), "a": (8000, None)}


MULTI = ["vllm", "serve", "m", "--data-parallel-multi-port-external-lb", "--port", "8200"]


@pytest.mark.parametrize(
    ("more", "host", "declared", "expected", "refusal"),
    [
        (["--data-parallel-size", "8", "--data-parallel-size-local", "4"], False, (8000,), range(8200, 8204), None),
        (["--data-parallel-size", "8"], False, (), range(8200, 8208), None),
        (["--data-parallel-size", "16", "-dpl=8", "-dpr", "8"], False, (), range(8200, 8208), None),
        (["--data-parallel-size", "16", "--nnodes", "2"], False, (), range(8200, 8201), "ranks_not_known"),
        (["--data-parallel-size-local", "$(LOCAL)"], False, (), range(8200, 8201), "ranks_not_known"),
        (["-dpl", "1000000"], False, (), range(8200, 8264), "too_many_ranks"),
        (["-dpl", "4", "--port", "65534"], False, (), range(65534, 65536), None),
        (["-dpl", "3"], True, (8200, 8201), range(8200, 8202), "port_not_declared"),
        (["-dpl", "2"], True, (8200, 8201), range(8200, 8202), None),
    ],
)
def test_each_rank_of_a_multi_port_server_has_a_page(
    more: list[str], host: bool, declared: tuple[int, ...], expected: range, refusal: str | None
) -> None:
    server = container(command=[*MULTI, *more], ports=ports(*declared))
    found = engine(pod(containers=[server], host_network=host, annotations={"prometheus.io/port": "8201"}))
    assert [t.port for t in found.targets] == list(expected)
    assert found.refusal == refusal
    one = engine(pod(containers=[container(command=["vllm", "serve", "m", "-dp", "8"])]))
    assert len(one.targets) == 1


def test_on_the_network_of_the_node_kv_events_are_read_at_declared_ports_only() -> None:
    command = ["vllm", "serve", "m", "--kv-events-config", '{"enable_kv_cache_events": true}']
    for host, declared, read_there in ((False, (), True), (True, (8000,), False), (True, (8000, 5557), True)):
        one = engine(pod(containers=[container(command=command, ports=ports(*declared))], host_network=host))
        assert (one.target.kv_events == EventsEndpoint(("", 5557))) is read_there


def test_an_engine_as_a_native_sidecar() -> None:
    document = pod(containers=[{"name": "app", "image": "own"}])
    document["spec"]["initContainers"] = [container("download"), container(restartPolicy="Always")]
    status = {"name": "vllm", "restartCount": 2, "ready": True, "containerID": "containerd://" + "ab" * 32}
    document["status"]["initContainerStatuses"] = [status]
    found = engine(document)
    assert (found.container, found.container_id, found.reading.restarts) == ("vllm", "ab" * 32, 2)
    assert found.target is not None


def test_a_selected_pod_has_one_engine_even_if_nothing_says_vllm_and_annotations_choose_and_forbid() -> None:
    own = container(command=["/start"], image="own")
    assert read(pod(containers=[own])).engines == ()
    assert engine(pod(containers=[own]), SELECTED).container == "vllm"
    side = {"name": "side", "image": "envoy"}
    assert engine(pod(containers=[side, own]), SELECTED).container == "vllm"
    assert read(pod(containers=[side, {**side, "name": "other"}]), SELECTED).engines == ()
    chosen = pod(containers=[container(), side], annotations={"kvpressure.io/container": "side"})
    assert engine(chosen).container == "side"
    assert read(pod(annotations={"kvpressure.io/scrape": "false"})).engines == ()


def ports(*numbers: int, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [
        {"containerPort": number, **({"name": names[i]} if i < len(names) else {})} for i, number in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    ("spec", "annotations", "host", "port", "refusal"),
    [
        ({"ports": ports(9000, 9001)}, {"prometheus.io/port": "9001"}, False, 9001, None),
        ({"ports": ports(9000, 9001)}, {"prometheus.io/port": "10250"}, False, 9000, None),
        ({"ports": ports(9000)}, {"prometheus.io/port": "10.0.0.1:9000"}, False, 9000, None),
        ({"ports": ports(9000)}, {"prometheus.io/port": "009000"}, False, 9000, None),
        ({"ports": ports(9000, 9001)}, {"kvpressure.io/port": "9001", "prometheus.io/port": "9000"}, False, 9001, None),
        ({"ports": ports(9000, 8000)}, {}, False, 8000, None),
        ({"ports": ports(9000, 9001, names=("grpc", "metrics"))}, {}, False, 9001, None),
        ({"ports": [{"containerPort": 9000, "protocol": "UDP"}]}, {}, False, 8000, None),
        ({"ports": []}, {}, False, 8000, None),
        ({"ports": [], "command": ["vllm", "serve", "m", "--port", "8123"]}, {}, False, 8123, None),
        ({"ports": ports(8123, 9000), "command": ["vllm", "serve", "m", "--port", "9000"]}, {}, False, 9000, None),
        ({"ports": ports(0, 70000, 9000)}, {}, False, 9000, None),
        ({"ports": []}, {}, True, None, "port_not_declared"),
        ({"ports": [], "command": ["vllm", "serve", "m", "--port", "10250"]}, {}, True, None, "port_not_declared"),
        ({"ports": ports(8000)}, {"prometheus.io/port": "10250"}, True, 8000, None),
        ({"ports": ports(10250)}, {}, True, None, "port_of_the_node"),
        ({"ports": ports(10250, 8000)}, {"prometheus.io/port": "10250"}, True, None, "port_of_the_node"),
    ],
)
def test_which_port(
    spec: dict[str, Any], annotations: dict[str, str], host: bool, port: int | None, refusal: str | None
) -> None:
    found = engine(pod(containers=[container(**spec)], annotations=annotations, host_network=host))
    assert (found.target.port if found.target else None, found.refusal) == (port, refusal)


@pytest.mark.attack(
    "pods that carry annotations of sidecars, other paths or foreign ports", "requests go to the pod's own engine only"
)
@pytest.mark.parametrize(
    ("annotations", "path", "refusal"),
    [
        ({"prometheus.io/path": "/x/metrics"}, "/x/metrics", None),
        ({"prometheus.io/path": "//evil.example/metrics"}, "//evil.example/metrics", None),
        ({"prometheus.io/path": "http://evil.example/"}, None, "bad_path"),
        ({"prometheus.io/path": "/a/../b"}, None, "bad_path"),
        ({"prometheus.io/path": "/m\r\nHost: x"}, None, "bad_path"),
        ({"prometheus.io/path": "/" + "a" * 600}, None, "bad_path"),
        ({"prometheus.io/path": "/m?x=1"}, None, "bad_path"),
    ],
)
def test_the_path_never_leaves_the_pod(annotations: dict[str, str], path: str | None, refusal: str | None) -> None:
    found = engine(pod(annotations=annotations))
    assert (found.target.path if found.target else None, found.refusal) == (path, refusal)
    if found.target is not None:
        assert found.target.host == "10.0.0.5"


def test_the_host_is_the_pods_address() -> None:
    for ip in ("10.0.0.5", "fd00::5"):
        assert target(pod(ip=ip)).host == ip
    for ip in (None, "evil.example", "10.0.0.5:80"):
        found = engine(pod(ip=ip))
        assert (found.target, found.refusal) == (None, "no_pod_ip")


def test_the_version_by_the_image() -> None:
    versions = {
        "vllm/vllm-openai:v0.32.0": "0.32.0",
        "vllm/vllm-openai:v0.9.1@sha256:ab": "0.9.1",
        "registry:5000/own/vllm-openai:0.6.3.post1": "0.6.3.post1",
        **dict.fromkeys(("vllm/vllm-openai:latest", "own:v1.2.3", "rocm/vllm:rocm6.4_v1.2.3")),
    }
    assert {image: target(pod(containers=[container(image=image)])).version for image in versions} == versions


def test_https() -> None:
    assert target(pod(annotations={"prometheus.io/scheme": "https"})).scheme == "https"
    assert target(pod(annotations={"prometheus.io/scheme": "file"})).scheme == "http"
    tls = pod(containers=[container(command=["vllm", "serve", "m", "--ssl-keyfile", "/k"])])
    assert target(tls).scheme == "https"
    assert target(tls).verify
    assert not target(tls, Policy(verify_tls=False)).verify


@pytest.mark.parametrize(("given", "port"), [("8081", 8081), ("", 9090), ("-1", None)])
def test_a_worker_of_dynamo_has_metrics_on_its_system_port(given: str, port: int | None) -> None:
    """Recipes declare it by its name, and the operator sets the variable."""
    env = [{"name": "DYN_SYSTEM_PORT", "value": given}] if given else []
    declared = ports(5557, 9090, names=("kv-events", "system"))
    worker = container(command=["python3", "-m", "dynamo.vllm", "--model", "m"], env=env, ports=declared)
    found = engine(pod(containers=[worker]))
    assert (None if found.target is None else found.target.port) == port
    assert found.refusal == (None if port else "metrics_off")


@pytest.mark.parametrize(("options", "port"), [([], 8002), (["--metrics-port", "9002"], 9002)])
def test_triton_has_metrics_unless_they_are_off(options: list[str], port: int) -> None:
    command = ["tritonserver", "--model-repository=/models", *options]
    triton = container(image="nvcr.io/nvidia/tritonserver:26.09-vllm-python-py3", command=command, ports=[])
    assert target(pod(containers=[triton])).port == port
    off = engine(pod(containers=[triton | {"command": [*command, "--allow-metrics=false"]}]))
    assert (off.target, off.refusal) == (None, "metrics_off")


LWS = "leaderworkerset.sigs.k8s.io/"
LWS_WORKER = {LWS + "name": "chat", LWS + "group-index": "0", LWS + "worker-index": "1"}
OF_TWO = ["vllm", "serve", "m", "--nnodes", "2", "--node-rank"]


@pytest.mark.parametrize(
    ("labels", "assumed"), [({}, True), (LWS_WORKER | {LWS + "worker-index": "0"}, False)], ids=["nothing", "leader"]
)
def test_a_server_whose_rank_is_hidden_is_assumed_unless_something_says_that_it_leads(
    labels: dict[str, str], assumed: bool
) -> None:
    """All nodes of the engine have this command, and those that follow never answer."""
    hidden = container(command=[*OF_TWO, "$(RANK)"], ports=[{"containerPort": 8000}])
    document = pod(labels=labels, containers=[hidden])
    assert target(document).assumed == assumed


def test_only_running_pods_are_scraped_and_evictions_are_seen() -> None:
    pending = engine(pod(phase="Pending"))
    assert (pending.target, pending.refusal) == (None, None)
    evicted = pod(phase="Failed", status={"reason": "Evicted", "containerStatuses": []})
    found = engine(evicted)
    assert found.target is None
    assert found.reading.last_termination == Termination("Evicted")
    assert (found.reading.restarts, found.reading.ready) == (None, None)


def test_a_container_that_is_down_right_now_reports_that_end() -> None:
    document = pod(last={"reason": "Error", "exitCode": 1})
    document["status"]["containerStatuses"][0]["state"] = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    assert engine(document).reading.last_termination == Termination("OOMKilled", 137)
    assert engine(document).target is not None


def crafted_pod(
    opening: str, unit: str, image: str = "busybox", phase: str = "Pending", script: bool = True
) -> dict[str, Any]:
    """A pod of 20 containers and 1.28 MB."""
    text = repeated(opening, unit, 64_000)
    return pod(
        phase=phase,
        containers=[
            container(f"c{i}", image=image, command=["sh", "-c", text] if script else ["vllm", "serve", text])
            for i in range(20)
        ],
    )


@pytest.mark.attack("a pending pod with nested variables in a 60 KB command", "read once, in linear time")
@pytest.mark.parametrize("unit", UNITS)
def test_no_pod_holds_the_exporter_up(unit: str) -> None:
    """Reading any pod that an API server would take costs at most 50 ms, whatever its containers are told to run."""
    for document in (
        crafted_pod("", unit),
        crafted_pod("vllm serve m --port 1; ", unit, IMAGE, "Running"),
        crafted_pod("vllm serve m --port 1 ", unit, phase="Running"),
        crafted_pod("", unit, script=False),
    ):
        assert within(0.05, partial(read_pod, document, ALL))


def test_what_is_remembered_of_commands_is_bounded_and_forgotten(commands_read: list[object]) -> None:
    lines = CommandLines(most_characters=20_000)
    pods = [pod(f"p{i}", containers=[container(command=["vllm", "serve", "x" * 2000])]) for i in range(10)]
    for document in pods:
        read_pod(document, ALL, lines)
    del commands_read[:]
    read_pod(pods[-1], ALL, lines)
    assert len(commands_read) == 0
    read_pod(pods[0], ALL, lines)
    assert len(commands_read) == 1
    lines.forget(pods[0]["metadata"]["uid"])
    read_pod(pods[0], ALL, lines)
    assert len(commands_read) == 2
    lines.keep([])
    read_pod(pods[0], ALL, lines)
    assert len(commands_read) == 3


def test_what_a_long_command_line_hides_is_not_taken_for_a_default() -> None:
    long = container(command=["vllm", "serve", "m", "--max-num-seqs", "8", *["--x"] * 30_000])
    found = target(pod(containers=[long]))
    assert command_line.read(found.args).args.max_num_seqs == 8
    assert command_line.read(found.args).args.is_explicit("max_model_len") is None
    crowded = [
        {"name": f"side{i}", "image": "own", "command": ["sh", "-c", "vllm bench serve " + "x " * 8000]}
        for i in range(5)
    ]
    found = target(pod(containers=[*crowded, container(command=["vllm", "serve", "m", "--port", "8000"])]))
    assert (found.container, found.port) == ("vllm", 8000)


@pytest.mark.parametrize("uid", ["ab" * 16, "0a1b2c3d-1111-2222-3333-444455556666"])
def test_static_pods_have_two_uids(uid: str) -> None:
    found = read(pod(annotations=of_static_pod(uid)))
    assert found.uids == {found.uid, uid}


def test_only_the_hash_of_a_static_pod_that_ran_is_a_uid() -> None:
    given = of_static_pod("ab" * 16)
    wrong = map(of_static_pod, ("", "k", "!" * 300, "a/../b", "AB" * 16, "ab" * 15, "ab\n" * 16))
    halves = [{name: given[name]} for name in given]
    for one in (*wrong, *halves, given | {"kubernetes.io/config.mirror": "cd" * 16}):
        found = read(pod(annotations=one))
        assert found.uids == {found.uid}, one
    never_ran = read(pod(annotations=given, status={"phase": "Pending", "containerStatuses": []}))
    assert never_ran.uids == {never_ran.uid}


def test_secrets_stay_out_of_targets() -> None:
    given = {"HF_TOKEN": "s1", "VLLM_API_KEY": "s2", "SEQS": "8", "VLLM_USE_V1": "1", "UNUSED": "x", "MAX_TOKENS": "9"}
    env: list[Any] = [{"name": name, "value": value} for name, value in given.items()]
    env.append({"name": "REF", "valueFrom": {"secretKeyRef": {}}})
    command = "vllm serve m --api-key s3 --hf-token=s4 --max-num-batched-tokens $(MAX_TOKENS) --max-num-seqs $(SEQS)"
    found = target(pod(containers=[container(command=[*command.split(), "--hf-token", "$(HF_TOKEN)"], env=env)]))
    assert found.env == {"VLLM_USE_V1": "1"}
    redacted = "--api-key=[redacted] --hf-token=[redacted] --max-num-batched-tokens=9 --max-num-seqs=8 --model=m"
    assert found.args == ("vllm", "serve", *redacted.split(" "))
    script = target(pod(containers=[container(command=["sh", "-c", "vllm serve m --api-key s5 --max-num-seqs 4"])]))
    assert script.args == ("vllm", "serve", "--api-key=[redacted]", "--max-num-seqs=4", "--model=m")


def test_quantities() -> None:
    said = {"500m": 0.5, 4: 4.0, "1.5": 1.5, "64Gi": 64 * 2.0**30, "100n": 1e-7}
    assert {text: quantity(text) for text in said} == pytest.approx(said)
    assert [quantity(text) for text in ("-1", "", True, "1" * 60, "1KB")] == [None] * 5


PROBE = {"httpGet": {"path": "/health", "port": 8000}}
DAY = "2026-01-02T"


def run_of(
    probe: bool = True, started: str = "03:00:00", ready: tuple[str, str] | None = None, **more: Any
) -> tuple[Run, str]:
    """The run of an engine that was scheduled at two, and the revision of its pool."""
    containers = [container(readinessProbe=PROBE) if probe else container()]
    status: dict[str, Any] = {"startTime": f"{DAY}02:00:00Z"}
    if ready is not None:
        status["conditions"] = [{"type": "Ready", "status": ready[0], "lastTransitionTime": f"{DAY}{ready[1]}Z"}]
    document = pod(containers=containers, status=status, **more)
    document["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": f"{DAY}{started}Z"}}
    reading = engine(document).reading
    assert reading.run is not None
    return reading.run, reading.pool.revision


SCHEDULED, STARTED = 1767319200.0, 1767322800.0


@pytest.mark.parametrize(
    ("probe", "ready", "answered"),
    [
        (True, ("True", "03:10:00"), STARTED + 600),
        (True, ("True", "03:00:00"), STARTED),
        (True, ("False", "03:10:00"), STARTED + 600),  # it was ready in this run
        (True, ("False", "03:00:00"), None),  # the run before ended in the second in which this one began
        (True, ("False", "02:00:00"), None),  # it has never been ready
        (True, None, None),
        (False, ("True", "03:10:00"), None),  # without a probe, ready only means that it runs
    ],
)
def test_whether_a_container_has_answered_in_its_present_run(
    probe: bool, ready: tuple[str, str] | None, answered: float | None
) -> None:
    assert run_of(probe, ready=ready)[0] == Run(SCHEDULED, answered)


def test_the_run_of_a_pod_that_does_not_run_or_shall_end() -> None:
    document = pod(phase="Pending", ip=None)
    state = document["status"]["containerStatuses"][0]
    for kind, reason in (("waiting", "ImagePullBackOff"), ("terminated", "Error")):
        state["state"] = {kind: {"reason": reason}}
        assert engine(document).reading.run == Run(stopped=reason)
    state["state"] = {"running": {}}
    document["metadata"]["deletionTimestamp"] = f"{DAY}03:00:00Z"
    assert engine(document).reading.run == Run(ended="deleted")
    assert engine(pod(phase="Failed")).reading.run == Run(ended="Failed")


@pytest.mark.parametrize(
    ("owner", "labels", "revision", "counted"),
    [
        (("ReplicaSet", "chat-7d4b"), {"pod-template-hash": "7d4b"}, "7d4b", True),
        (("ReplicaSet", "chat-7d4b"), {"rollouts-pod-template-hash": "7d4b"}, "7d4b", True),
        (("StatefulSet", "chat"), {"controller-revision-hash": "chat-66f"}, "chat-66f", True),
        (("RayCluster", "chat"), {}, "", False),
        (("Job", "chat"), {}, "", False),
        (None, {}, "", False),
    ],
)
def test_revision_of_a_pod_and_whether_its_replicas_are_counted(
    owner: tuple[str, str] | None, labels: dict[str, str], revision: str, counted: bool
) -> None:
    run, of_pool = run_of(owner=owner, labels=labels)
    assert (of_pool, run.counted) == (revision, counted)
