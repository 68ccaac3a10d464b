"""The cluster of a situation at each minute: pods as API objects, their servers, GPUs, and kube-state-metrics."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

from kvpressure.model.readings import ContainerReading, GpuReading
from kvpressure.model.reasons import HTTP_5XX, REFUSED, TIMEOUT
from lab.alerts.servers import Server

EPOCH: Final = 1_700_000_000.0  # the exporter's clock at minute 0; promtool's stands at 0
_BEFORE_SECONDS: Final = 3600.0  # how long what is there at minute 0 has run
_MEMORY_LIMIT: Final = 64 * 1024**3  # of a container, bytes
_GPU_MEMORY: Final = 80 * 1024**3
_FAILURES: Final = {"refused": REFUSED, "timeout": TIMEOUT, "http500": HTTP_5XX}
_LWS: Final = "leaderworkerset.sigs.k8s.io/"
Samples = Iterator[tuple[str, float]]


class UnplayableError(Exception):
    """A situation that is not as the format says."""


class Kind(NamedTuple):
    """A kind of workload. ``owner``: of its pods, "" = none. ``hash_label``: the pods' label with the revision, which
    ends the owner's name. ``wanted`` and ``available``: kube-state-metrics' counts of its replicas, whose second word
    is the label with its name.
    """

    owner: str = ""
    hash_label: str = ""
    wanted: str = ""
    available: str = ""


KINDS: Final = {
    "Deployment": Kind(
        "ReplicaSet",
        "pod-template-hash",
        "kube_deployment_spec_replicas",
        "kube_deployment_status_replicas_available",
    ),
    "StatefulSet": Kind("StatefulSet", "", "kube_statefulset_replicas", "kube_statefulset_status_replicas_ready"),
    "LeaderWorkerSet": Kind("StatefulSet", "", "kube_statefulset_replicas", "kube_statefulset_status_replicas_ready"),
    "ReplicaSet": Kind("ReplicaSet", "rollouts-pod-template-hash"),
    "KnativeService": Kind("ReplicaSet", "pod-template-hash"),
    "RayCluster": Kind("RayCluster"),
    "Pod": Kind(),
}
_REVISED_BY: Final = {"Deployment": "Deployment", "ReplicaSet": "Rollout"}  # kinds whose ReplicaSets are counted


class Status(NamedTuple):
    """What Kubernetes shows of a pod. ``waiting``: its container's reason. ``runs``: the container has a process."""

    phase: str = "Running"
    ready: bool = False
    waiting: str = ""
    runs: bool = True


STATUSES: Final = {
    "pending": Status("Pending", runs=False),
    "image": Status("Pending", waiting="ImagePullBackOff", runs=False),
    "starting": Status(),
    "ready": Status(ready=True),
    "notready": Status(),
    "crashed": Status(waiting="CrashLoopBackOff", runs=False),
    "terminating": Status(),
}


def at(phases: Sequence[Mapping[str, Any]], minute: float) -> Mapping[str, Any]:
    """The last of the phases that has begun; empty before the first."""
    return next((phase for phase in reversed(phases) if phase["from"] <= minute), {})


def _time(minute: float) -> str:
    return datetime.fromtimestamp(EPOCH + 60 * minute, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _uid(*names: object) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, "/".join(map(str, names)))


def series(name: str, **labels: object) -> str:
    """A series as it is written."""
    body = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{body}}}"


class Pod:
    """A pod and its server. ``now``: its phase with the restarts and the last termination so far; ``None`` = it does
    not exist.
    """

    def __init__(self, spec: Mapping[str, Any], workload: Mapping[str, Any], number: int, blocks: Mapping[str, Any]):
        self.spec, self.workload, self._blocks = spec, workload, blocks
        self.namespace, self.name = str(workload["namespace"]), str(spec["name"])
        self.node, self.container = str(spec["node"]), str(spec["container"])
        self.address = f"10.0.{number // 250}.{number % 250 + 1}"
        self.kind = KINDS[workload["kind"]]
        self.minute = 0.0
        self.now: dict[str, Any] | None = None
        self._server: Server | None = None
        self._restarts = 0

    @cached_property
    def owner(self) -> str:
        """Name of its controller; "" without one."""
        name = self.name.rpartition("-")[0] if self.kind.hash_label else str(self.workload["name"])
        return name if self.kind.owner else ""

    @cached_property
    def labels(self) -> dict[str, str]:
        """Those of its controllers and its author."""
        name, kind = str(self.workload["name"]), self.workload["kind"]
        given = {self.kind.hash_label: self.owner.rpartition("-")[2]} if self.kind.hash_label else {}
        if kind == "LeaderWorkerSet":
            group, _, worker = self.name.removeprefix(f"{name}-").partition("-")
            given = {f"{_LWS}name": name, f"{_LWS}group-index": group, f"{_LWS}worker-index": worker or "0"}
        elif kind == "KnativeService":
            given["serving.knative.dev/service"] = name
        return {**given, **(self.workload.get("labels") or {}), **(self.spec.get("labels") or {})}

    @property
    def follows(self) -> bool:
        """Whether it is a worker of one of the workload's replicas, not a replica."""
        return self.labels.get(f"{_LWS}worker-index", "0") != "0"

    @cached_property
    def first(self) -> float:
        """Minute from which it exists."""
        return float(next(phase["from"] for phase in self.spec["phases"] if phase["status"] != "deleted"))

    @property
    def status(self) -> Status:
        """What Kubernetes shows while it exists."""
        return STATUSES[(self.now or {})["status"]]

    @property
    def bound(self) -> bool:
        """Whether it exists and has a node."""
        return self.now is not None and self.now["status"] != "pending"

    def advance(self, minute: float, seconds: float) -> None:
        """Let time pass until ``minute``."""
        self.minute, self.now = minute, self._phase(minute)
        entry = at(self.spec.get("server") or (), minute)
        if self.now is None or not self.status.runs or entry.get("answers", "refused") == "refused":
            self._server = None
        elif "traffic" in entry:
            if self._server is None or self._restarts != self.now["restarts"]:
                self._server = Server(str(self.spec["version"]), self.spec["model"], self._started(minute))
                seconds = seconds if minute else _BEFORE_SECONDS
            self._server.advance(self._blocks[entry["traffic"]], seconds)
            self._restarts = self.now["restarts"]

    def scrape(self) -> tuple[str | None, str | None]:
        """(text of its metrics, ``None``) or (``None``, the reason of failure)."""
        if self.now is None:
            return None, TIMEOUT
        entry = at(self.spec.get("server") or (), self.minute)
        if self._server is None or entry["answers"] != "ok":
            return None, _FAILURES.get(entry.get("answers", "refused"), REFUSED)
        return self._server.text(self._blocks[entry["traffic"]]), None

    def _started(self, minute: float) -> float:
        return EPOCH + 60 * minute - (0 if minute else _BEFORE_SECONDS)

    def _phase(self, minute: float) -> dict[str, Any] | None:
        past: list[Mapping[str, Any]] = []  # of this life: a new pod may have the name of a deleted one
        for phase in self.spec["phases"]:
            if phase["from"] <= minute:
                past = [] if phase["status"] == "deleted" else [*past, phase]
        if not past:
            return None
        kept: dict[str, Any] = {"restarts": 0, "last": None, "born": past[0]["from"], "began": past[0]["from"]}
        for phase in past:
            kept["restarts"] = phase.get("restarts", kept["restarts"])
            if phase["status"] == "starting" or "restarts" in phase:
                kept["began"] = phase["from"]
            if last := phase.get("last"):
                ended = {"reason": last.get("reason"), "exitCode": last.get("exit_code")}
                kept["last"] = {**ended, "finishedAt": _time(phase["from"])}
        return {**kept, "status": past[-1]["status"], "from": past[-1]["from"]}

    def document(self) -> dict[str, Any]:
        """The API object of a bound pod."""
        now, status = self.now or {}, self.status
        began = _time(now["began"] or -_BEFORE_SECONDS / 60)
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": self.namespace,
            "uid": str(_uid(self.namespace, self.name, now["born"])),
            "labels": self.labels,
            "creationTimestamp": _time(now["born"] or -_BEFORE_SECONDS / 60),
        }
        if self.owner:
            metadata["ownerReferences"] = [{"kind": self.kind.owner, "name": self.owner, "controller": True}]
        if now["status"] == "terminating":
            metadata["deletionTimestamp"] = _time(now["from"])
        limits = {"nvidia.com/gpu": str(len(self.spec.get("gpus") or ()))}
        if self.spec.get("host_memory"):
            limits["memory"] = str(_MEMORY_LIMIT)
        container = {
            "name": self.container,
            "image": f"vllm/vllm-openai:v{self.spec['version']}",
            "args": [str(arg) for arg in self.spec.get("args") or ()],
            "ports": [{"containerPort": 8000, "name": "http"}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},  # as in vLLM's own chart
            "resources": {"limits": limits},
        }
        container_status = {
            "name": self.container,
            "ready": status.ready,
            "restartCount": now["restarts"],
            "state": {"waiting": {"reason": status.waiting}} if status.waiting else {"running": {"startedAt": began}},
            "lastState": {"terminated": now["last"]} if now["last"] else {},
            "containerID": f"containerd://{_uid(self.namespace, self.name, now['restarts']).hex}",
        }
        condition = {"type": "Ready", "status": str(status.ready), "lastTransitionTime": _time(now["from"])}
        return {
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"nodeName": self.node, "containers": [container]},
            "status": {
                "phase": status.phase,
                "podIP": self.address,
                "conditions": [condition],
                "containerStatuses": [container_status],
            },
        }

    def memory(self) -> ContainerReading | None:
        """Host memory of its container; ``None`` = unknown."""
        share = at(self.spec.get("host_memory") or (), self.minute).get("share_of_limit")
        if share is None or not self.bound or not self.status.runs:
            return None
        used = round(share * _MEMORY_LIMIT)
        return ContainerReading(
            self.namespace,
            self.name,
            self.container,
            memory_working_set_bytes=used,
            memory_limit_bytes=_MEMORY_LIMIT,
        )

    def gpu(self, index: int, since: float) -> dict[str, Any]:
        """One of its GPUs, as far as it differs from a free one. Faults are those of its first one, and driver events,
        which a lost GPU keeps, those since minute ``since``.
        """
        past = [one for one in self.spec.get("gpu") or () if one["from"] <= self.minute]
        failing = index == self.spec["gpus"][0]
        xids = [one for one in past if failing and "xid" in one and one["from"] >= since]
        events = {
            "xid_errors": {one["xid"]: sum(other["xid"] == one["xid"] for other in xids) for one in xids},
            "xid_last_times": {one["xid"]: EPOCH + 60 * one["from"] for one in xids},
        }
        if failing and past and past[-1].get("state") == "lost":
            return {"error": "lost", **events}
        if not self.status.runs:
            return events
        known = {key: value for one in past for key, value in one.items()}
        used = known.get("memory_used")
        return {
            "memory_total_bytes": _GPU_MEMORY,
            "memory_used_bytes": None if used is None else round(used * _GPU_MEMORY),
            "utilization_ratio": known.get("utilization"),
            **events,
        }

    def samples(self) -> Samples:
        """What kube-state-metrics publishes of it while it exists."""
        status = self.status
        pod = {"namespace": self.namespace, "pod": self.name}
        node = self.node if self.bound else ""
        yield series("kube_pod_info", **pod, node=node, created_by_kind=self.kind.owner, created_by_name=self.owner), 1
        for condition in (True, False):
            labels = {**pod, "condition": str(condition).lower()}
            yield series("kube_pod_status_ready", **labels), status.ready is condition
        for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown"):
            yield series("kube_pod_status_phase", **pod, phase=phase), status.phase == phase
        if not self.bound:
            yield series("kube_pod_status_unschedulable", **pod), 1
        elif status.waiting:
            container = {**pod, "container": self.container, "reason": status.waiting}
            yield series("kube_pod_container_status_waiting_reason", **container), 1


class Cluster:
    """Nodes, workloads and pods of a situation; ``advance`` moves all to a minute."""

    def __init__(self, situation: Mapping[str, Any]) -> None:
        workloads = {one["name"]: one for one in situation["workloads"]}
        self._workloads = workloads.values()
        self.nodes = {str(node["name"]): int(node["gpus"]) for node in situation["cluster"]["nodes"]}
        self.counted = bool(situation["cluster"].get("kube_state_metrics"))
        blocks = situation.get("traffic") or {}
        self.pods = [
            Pod({"version": "0.11.0", **spec}, workloads[spec["workload"]], number, blocks)
            for number, spec in enumerate(situation["pods"], start=1)
        ]
        self.minute = 0.0

    def advance(self, minute: float, seconds: float) -> None:
        """Let time pass until ``minute``."""
        self.minute = minute
        for pod in self.pods:
            pod.advance(minute, seconds)

    def on(self, node: str) -> list[Pod]:
        """Pods that are bound to a node."""
        return [pod for pod in self.pods if pod.node == node and pod.bound]

    def gpus(self, node: str, since: float) -> Iterator[GpuReading]:
        """A node's GPUs."""
        holders = {index: pod for pod in self.on(node) for index in pod.spec.get("gpus") or ()}
        for index in range(self.nodes[node]):
            free = {
                "memory_total_bytes": _GPU_MEMORY,
                "memory_used_bytes": _GPU_MEMORY // 160,
                "utilization_ratio": 0.0,
            }
            state = holders[index].gpu(index, since) if index in holders else {}
            read = state if "error" in state else free | state
            yield GpuReading(self.uuid(node, index), index, "nvidia", "NVIDIA H100 80GB HBM3", **read)

    @staticmethod
    def uuid(node: str, index: int) -> str:
        """Of a GPU."""
        return f"GPU-{_uid(node, index)}"

    def samples(self, exporters: Mapping[str, str]) -> Samples:
        """What kube-state-metrics publishes. ``exporters``: by node, state of its exporter. A node whose exporter is
        gone and that has no pod is removed; one whose exporter is down and that has no ready pod is not ready.
        """
        for pod in self.pods:
            if pod.now is not None:
                yield from pod.samples()
        for workload in self._workloads:
            yield from self._counts(workload)
        for node, gpus in self.nodes.items():
            pods, exporter = self.on(node), exporters[node]
            if exporter == "gone" and not pods:
                continue
            ready = exporter != "down" or any(pod.status.ready for pod in pods) or not pods
            for status, value in (("true", ready), ("false", False), ("unknown", not ready)):
                yield series("kube_node_status_condition", node=node, condition="Ready", status=status), value
            yield series("kube_node_status_allocatable", node=node, resource="nvidia_com_gpu", unit="integer"), gpus
            if exporter != "gone":
                name = {"namespace": "kvpressure", "pod": f"kvpressure-{node}"}
                yield series("kube_pod_info", **name, node=node, created_by_kind="DaemonSet"), 1

    def _counts(self, workload: Mapping[str, Any]) -> Samples:
        name, namespace, kind = workload["name"], workload["namespace"], KINDS[workload["kind"]]
        wanted = at(workload["replicas"], self.minute).get("wanted", 0)
        begun = [pod for pod in self.pods if pod.workload is workload and pod.first <= self.minute]
        pods = [pod for pod in begun if pod.now and pod.now["status"] != "terminating" and not pod.follows]
        ready = [pod for pod in pods if pod.status.ready]
        if kind.wanted:
            label = {kind.wanted.split("_")[1]: name}
            yield series(kind.wanted, namespace=namespace, **label), wanted
            yield series(kind.available, namespace=namespace, **label), len(ready)
        if workload["kind"] in _REVISED_BY:
            newest = max(begun, key=lambda pod: pod.first).owner if begun else ""
            for owner in {pod.owner for pod in begun}:
                labels = {"namespace": namespace, "replicaset": owner}
                own = sum(pod.owner == owner for pod in pods)
                left = wanted - len(pods) + own if owner == newest else own
                yield series("kube_replicaset_spec_replicas", **labels), max(0, left)
                yield (
                    series("kube_replicaset_status_ready_replicas", **labels),
                    sum(pod.owner == owner for pod in ready),
                )
                revised = {"owner_kind": _REVISED_BY[workload["kind"]], "owner_name": name}
                yield series("kube_replicaset_owner", **labels, **revised, owner_is_controller="true"), 1
