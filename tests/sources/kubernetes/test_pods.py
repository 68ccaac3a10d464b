"""The source of pods: readings, targets, several namespaces, churn, and what stays when the API server does not."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest

from kvpressure.model.readings import GpuOwner, NodeCondition, Termination
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import Reading, SourceError
from kvpressure.sources.kubernetes import api as kube
from kvpressure.sources.kubernetes import pods as pods_module
from kvpressure.sources.kubernetes.json_list import read_list
from kvpressure.sources.kubernetes.node import NodeSource
from kvpressure.sources.kubernetes.pod import Pod, with_uids_of_their_own
from kvpressure.sources.kubernetes.pods import PodsSource
from tests.helpers.failing import reason_of
from tests.helpers.waiting import until
from tests.sources.kubernetes.apiserver import FakeApi
from tests.sources.kubernetes.objects import container, container_id, node, pod

Build = Callable[..., Settings]
FAST = (0.02, 0.1)


def names(reading: Reading) -> list[tuple[str, str, str]]:
    return [(c.namespace, c.pod, c.container) for c in reading.containers or ()]


def test_engines_of_this_node_and_nothing_else(api: FakeApi, settings: Build) -> None:
    api.apply(pod("a", restarts=2, last={"reason": "OOMKilled", "exitCode": 137}))
    api.apply(pod("elsewhere", node="node-2"))
    api.apply(pod("web", containers=[{"name": "nginx", "image": "nginx"}]))
    chosen = settings(kube_api_url=api.url)
    source = PodsSource(chosen)
    reading = source.read()
    source.close()
    assert names(reading) == [("inference", "a", "vllm")]
    assert reading.containers[0].restarts == 2
    assert reading.containers[0].last_termination == Termination("OOMKilled", 137)
    assert [t.name for t in chosen.shared.targets] == ["http://10.0.0.5:8000/metrics"]
    assert chosen.shared.pods is not None
    assert [p.name for p in chosen.shared.pods] == ["a", "web"]
    assert reading.errors == {}


@pytest.mark.parametrize(
    ("how", "port"),
    [
        ({}, 9000),
        ({"annotations": {"kvpressure.io/port": "8001"}}, 8001),
        ({"ports": [{"containerPort": 8000}]}, 9000),
        ({"ports": [{"containerPort": 8000}], "host_network": True}, 8000),
    ],
)
def test_a_port_that_is_not_certain_is_that_of_its_process(
    api: FakeApi, settings: Build, how: dict[str, Any], port: int
) -> None:
    hidden = container(command=["/start.sh"], ports=how.pop("ports", []))
    api.apply(pod("a", containers=[hidden], **how))
    chosen = settings(kube_api_url=api.url)
    words = ("vllm", "serve", "--port=9000")
    chosen.shared.processes = {container_id("inference", "a", "vllm"): (words, 9000)}
    source = PodsSource(chosen)
    reading = source.read()
    source.close()
    assert [(target.port, target.args) for target in chosen.shared.targets] == [(port, words)]
    assert [row.address for row in reading.discovered or ()] == [f"http://10.0.0.5:{port}/metrics"]


def test_selector_and_namespaces(api: FakeApi, settings: Build) -> None:
    api.apply(pod("a", "one", "10.0.0.1", labels={"app": "vllm"}))
    api.apply(pod("b", "two", "10.0.0.2", labels={"app": "vllm"}))
    api.apply(pod("c", "three", "10.0.0.3", labels={"app": "vllm"}))
    api.apply(pod("d", "one", "10.0.0.4"))
    source = PodsSource(settings(kube_api_url=api.url, kube_selector="app=vllm", kube_namespaces=("one", "two")))
    assert names(source.read()) == [("one", "a", "vllm"), ("two", "b", "vllm")]
    source.close()
    assert {path for path, _ in api.requests} == {"/api/v1/namespaces/one/pods", "/api/v1/namespaces/two/pods"}


def test_one_forbidden_namespace_costs_only_itself(api: FakeApi, settings: Build) -> None:
    api.apply(pod("a", "one"))
    api.apply(pod("b", "two"))
    api.status["/api/v1/namespaces/two/pods"] = 403
    source = PodsSource(settings(kube_api_url=api.url, kube_namespaces=("one", "two")), backoff_seconds=FAST)
    reading = source.read()
    source.close()
    assert names(reading) == [("one", "a", "vllm")]
    assert reading.errors["api_forbidden"] >= 1


def reason_or_none(source: PodsSource | NodeSource) -> str | None:
    try:
        source.read()
    except SourceError as error:
        return error.reason
    return None


def test_a_server_that_never_answers(api: FakeApi, settings: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "SYNC_SECONDS", 0.2)
    api.hang = True
    source = PodsSource(settings(kube_api_url=api.url))
    assert reason_of(source.read, pods_module.REASONS) == "api_timeout"
    source.close()


def test_a_failed_request_is_counted_once_however_often_the_source_is_read(api: FakeApi, settings: Build) -> None:
    api.status["list"] = 503
    source = PodsSource(settings(kube_api_url=api.url), backoff_seconds=FAST)
    counted = 0
    for _ in range(50):
        with pytest.raises(SourceError) as caught:
            source.read()
        counted += sum(caught.value.counts.values())
    assert 1 <= counted <= len(api.requests) < 50
    source.close()


@pytest.mark.attack("status updates of such a pod", "the command is not read again")
def test_a_change_of_status_reads_no_command_again(api: FakeApi, settings: Build, commands_read: list[object]) -> None:
    api.apply(pod("a"))
    chosen = settings(kube_api_url=api.url)
    source = PodsSource(chosen)
    source.read()
    for restarts in range(1, 6):
        api.apply(pod("a", restarts=restarts))
    until(lambda: [c.restarts for c in source.read().containers or ()] == [5])
    assert len(commands_read) == 1
    api.apply(pod("a", containers=[container(command=["vllm", "serve", "other"])]))
    until(lambda: ["--model=other" in t.args for t in source.read() and chosen.shared.targets] == [True])
    env = [{"name": "VLLM_X", "value": "1"}]
    api.apply(pod("a", containers=[container(command=["vllm", "serve", "other"], env=env)]))
    until(lambda: [t.env for t in source.read() and chosen.shared.targets] == [{"VLLM_X": "1"}])
    source.close()


def test_refused_engines_and_command_lines_that_are_cut_are_counted_once(api: FakeApi, settings: Build) -> None:
    long = "vllm serve m " + "--lora-modules a=b " * 1000
    api.apply(pod("a", containers=[container(command=["bash", "-c", long])]))
    env = [{"name": f"VLLM_{number}", "value": "x" * 1000} for number in range(30)]
    api.apply(pod("b", ip="10.0.0.2", containers=[container(env=env)]))
    api.apply(pod("c", ip=None))
    api.apply(pod("d", containers=[container(command=["vllm", "serve", "m", "--headless"])]))
    source = PodsSource(settings(kube_api_url=api.url))
    reading = source.read()
    assert reading.errors == {"no_pod_ip": 1, "command_cut": 2}
    assert {found.pod: found.complete for found in reading.discovered} == {"a": False, "b": True, "c": True, "d": True}
    assert source.read().errors == {}
    api.apply(pod("e", annotations={"prometheus.io/path": "/.."}))
    until(lambda: source.read().errors == {"bad_path": 1})
    source.close()


def test_of_two_engines_with_one_address_that_with_a_gpu_is_read_else_the_first(api: FakeApi, settings: Build) -> None:
    for name in ("b", "a"):
        api.apply(pod(name, ip="10.0.0.5", host_network=True))
    both = [container("one", command=None), container("two", command=None)]
    api.apply(pod("c", ip="10.0.0.6", containers=both))
    api.apply(pod("d", "aaa", "10.0.0.7", host_network=True, containers=[container(resources={})]))
    api.apply(pod("z", "zzz", "10.0.0.7", host_network=True))
    chosen = settings(kube_api_url=api.url)
    source = PodsSource(chosen)
    assert source.read().errors == {"same_address": 3}
    assert source.read().errors == {}
    assert {(t.pod, t.container) for t in chosen.shared.targets} == {("a", "vllm"), ("c", "one"), ("z", "vllm")}
    source.close()


class LargePods:
    """An API server that lists 60 pods of 240 KB, each made when its turn comes; its watch ends at once."""

    def _chunks(self) -> Iterator[bytes]:
        env = [{"name": f"V{n}", "valueFrom": {"secretKeyRef": {"name": f"s-{n}", "key": "k"}}} for n in range(400)]
        yield b'{"metadata": {"resourceVersion": "1"}, "items": ['
        for number in range(60):
            made = pod(f"p{number}", containers=[container(env=env)], annotations={"last-applied": "x" * 210_000})
            yield json.dumps(made).encode() + (b"," if number < 59 else b"]}")

    def items(self, *_: object) -> Generator[dict[str, Any], None, Mapping[str, Any]]:
        return (yield from read_list(self._chunks(), kube.MAX_EVENT_BYTES))

    def watch(self, *_: object) -> Iterator[dict[str, Any]]:
        yield from ()


@pytest.mark.slow
@pytest.mark.attack("hundreds of pods of 240 KB", "one at a time in memory")
def test_large_pods_are_read_one_at_a_time(settings: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "SYNC_SECONDS", 60.0)  # traced, sixty of them took five seconds on a loaded machine
    chosen = settings()
    source = PodsSource(chosen, LargePods())
    tracemalloc.start()
    try:
        source.read()
        assert len(chosen.shared.pods or ()) == 60
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
        source.close()


def test_pods_beyond_the_limit_are_counted(api: FakeApi, settings: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every read, for as long as there are too many, and exactly."""
    monkeypatch.setattr(pods_module, "MAX_PODS", 3)
    made = [pod(f"p{i}", ip=f"10.0.0.{i}") for i in range(6)]
    for one in made:
        api.apply(one)
    source = PodsSource(settings(kube_api_url=api.url))
    for _ in range(2):
        reading = source.read()
        assert names(reading) == [("inference", f"p{i}", "vllm") for i in range(3)]
        assert reading.errors == {"too_many_pods": 3}
        assert [row.pod for row in reading.discovered or ()] == [f"p{i}" for i in range(3)]
    api.delete(made[4])
    until(lambda: source.read().errors == {"too_many_pods": 2})
    api.apply({**made[3], "status": {**made[3]["status"], "phase": "Succeeded"}})
    api.delete(made[0])
    until(lambda: len(names(source.read())) == 2)
    api.apply({**made[3], "metadata": {**made[3]["metadata"], "labels": {"changed": "yes"}}})
    until(lambda: [one[1] for one in names(source.read())] == ["p1", "p2", "p3"])
    assert source.read().errors == {"too_many_pods": 1}
    source.close()


def test_pods_give_their_places_by_claim(api: FakeApi, settings: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods_module, "MAX_PODS", 4)
    idle = container(command=["vllm", "serve", "m"], resources={})
    for phase, name in (("Failed", "a"), ("Succeeded", "b"), ("Pending", "c"), ("Running", "d"), ("Running", "e")):
        api.apply(pod(name, "aaa", phase=phase, containers=[idle]))
    chosen = settings(kube_api_url=api.url)
    source = PodsSource(chosen)
    source.read()
    assert [one.name for one in chosen.shared.pods or ()] == ["a", "c", "d", "e"]
    api.apply(pod("z", "zzz", ip="10.0.0.9"))  # while all places are taken
    until(lambda: source.read() and "z" in [one.name for one in chosen.shared.pods or ()])
    assert [one.name for one in chosen.shared.pods or ()] == ["c", "d", "e", "z"]
    chosen.shared.owners = (GpuOwner("GPU-0", "zzz", "y", "vllm"),)
    api.apply(pod("y", "zzz", ip="10.0.0.8", phase="Pending", containers=[idle]))
    until(lambda: source.read() and "y" in [one.name for one in chosen.shared.pods or ()])
    assert [one.name for one in chosen.shared.pods or ()] == ["d", "e", "y", "z"]
    source.close()


def test_node_conditions(api: FakeApi, settings: Build) -> None:
    api.apply(node(MemoryPressure="False", Ready="True", DiskPressure="Unknown"))
    source = NodeSource(settings(kube_api_url=api.url), backoff_seconds=FAST)
    assert source.read().node_conditions == (
        NodeCondition("MemoryPressure", False),
        NodeCondition("Ready", True),
        NodeCondition("DiskPressure", None),
    )
    api.status["/api/v1/nodes"] = 403
    api.cut()
    until(lambda: reason_or_none(source) == "api_forbidden")
    api.status.clear()
    until(lambda: reason_or_none(source) is None)
    api.apply({**node(Ready="False"), "metadata": {"name": "node-2"}})
    odd = [{"type": "A", "status": []}, {"type": 1}, "x", {"type": "A", "status": "True"}]
    api.apply({**node(), "status": {"conditions": odd}})
    until(lambda: source.read().node_conditions == (NodeCondition("A", True),))
    api.apply({**node(), "status": "none"})
    until(lambda: reason_or_none(source) == "api_not_found")
    api.apply(node(Ready="True"))
    until(lambda: reason_or_none(source) is None)
    api.delete(node())
    until(lambda: reason_or_none(source) == "api_not_found")
    assert {path for path, _ in api.requests} == {"/api/v1/nodes"}
    source.close()


def test_a_uid_that_two_pods_claim_is_that_of_the_pod_whose_own_it_is() -> None:
    of_a, of_b, shared = "a" * 32, "b" * 32, "c" * 32
    pods = [
        Pod("ns", "a", of_a, uids=frozenset({of_a})),
        Pod("ns", "b", of_b, uids=frozenset({of_b, of_a, shared, "d" * 32})),
        Pod("ns", "c", "e" * 32, uids=frozenset({"e" * 32, shared})),
    ]
    assert [pod.uids for pod in with_uids_of_their_own(pods)] == [{of_a}, {of_b, "d" * 32}, {"e" * 32}]
