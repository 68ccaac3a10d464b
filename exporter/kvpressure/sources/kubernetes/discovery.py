"""Why a container is taken for an engine, or not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpressure.engines.command import Node
from kvpressure.model.pools import Workload
from kvpressure.model.reasons import NEVER_ANSWERED, TARGET_LIMIT, in_words
from kvpressure.parsed import mapping, mappings, text
from kvpressure.sources.kubernetes.endpoint import LOOPBACK
from kvpressure.sources.scrape.targets import Target

NAMED: Final = "annotation"
OF_COMMAND: Final = "command"
OF_ARGUMENTS: Final = "arguments"
OF_IMAGE: Final = "image"
OF_SELECTOR: Final = "selector"
OF_TITLE: Final = "title"
SIGNS: Final[Mapping[str, str]] = {
    NAMED: "the annotation kvpressure.io/container names it",
    OF_COMMAND: "its command starts an inference server",
    OF_ARGUMENTS: "its arguments are those of an inference server",
    OF_IMAGE: "its image is an inference server's and it has an accelerator",
    OF_SELECTOR: "the label selector of the exporter selects its pod",
    OF_TITLE: "one of its processes has the title of an inference server's",
}
"""Signs of an engine, the strongest first."""

REASONS: Final[Mapping[str, str]] = {
    "opted_out": "the annotation kvpressure.io/scrape is false",
    "other_container_named": "the annotation kvpressure.io/container names another container",
    "other_server": "an inference server that kvpressure does not support",
    "nim": "an NVIDIA NIM that serves no language model",
    "worker": "a worker of an engine that another pod serves",
    "no_gpu": "its image or text names an inference server, but it has no accelerator and no command that starts one",
    "other_container": "another container of the pod starts the inference server",
    "no_sign": "it has an accelerator, but neither its command nor its image names an inference server",
}
"""Why a container is not an engine."""

TOO_MANY_PODS: Final = "too_many_pods"
NO_TARGET: Final[Mapping[str, str]] = {
    "no_endpoint": "a worker of an engine that another pod serves",
    "not_running": "its pod is not running",
    "no_pod_ip": "its pod has no IP address",
    "port_not_declared": "its pod is on the host network and does not declare the port",
    "port_of_the_node": "the port belongs to a component of the node",
    "port_of_a_sidecar": "the port belongs to a service mesh sidecar",
    "port_unknown": "its command takes the port from a variable whose value is not in the pod",
    "bad_port": "the annotation kvpressure.io/port is not a port number",
    "unix_socket": "it listens on a Unix socket",
    "metrics_off": "it publishes no metrics with its present settings",
    "bad_path": "the path or scheme of its metrics is not valid",
    "annotated_container_missing": "the annotation kvpressure.io/container names no container of the pod",
    "same_address": "another engine already has this address",
    "ranks_not_known": "the number of its data-parallel ranks is unknown",
    "too_many_ranks": "it has more data-parallel ranks than are scraped of one container",
    "not_listening": "its process does not listen on its port: it is starting, or another process has the port",
    "not_readable": "its process is another user's, and its command line does not show the port",
    "several_ports": "its process listens on several ports, and its command line shows none of them",
    NEVER_ANSWERED: "only its image, or what is not understood of its command, names a server, and none has answered",
    LOOPBACK: "it listens on the loopback address of its container only",
    "ended": "its process has ended; its address is scraped for an hour more",
    TARGET_LIMIT: "the node has more metrics endpoints than the limit, and others have a better claim",
    TOO_MANY_PODS: "the node has more pods than the limit, and others have a better claim",
}
"""Why an engine is not scraped, or not on all of its ports."""

OF_WORKERS: Final = ("worker", "no_endpoint")
"""Reasons of containers whose metrics another pod serves."""

_OTHER_SERVERS: Final = (
    "text-generation-inference",
    "text-embeddings-inference",
    "tritonserver",
    "tensorrt-llm",
    "trtllm",
    "lmdeploy",
    "ollama",
    "llama.cpp",
    "mlserver",
    "torchserve",
)


@dataclass(frozen=True, slots=True)
class ContainerRow:
    """One container. ``sign`` "" = no engine, because of ``reason``; a sign with a ``reason`` = an engine without a
    target, or without all of them. ``complete``: all its arguments are visible. ``gpus``: requested, by resource.
    ``role``, ``arguments``: as in ``Discovered``. ``error``: of its scrape, "" = none.
    """

    container: str
    reason: str = ""
    sign: str = ""
    target: Target | None = None
    complete: bool = False
    gpus: Mapping[str, int] = field(default_factory=dict)
    role: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def result(self) -> str:
        """``engine`` (scraped), ``no_target`` (an engine that is not scraped) or ``not_engine``."""
        if not self.sign:
            return "not_engine"
        return "engine" if self.target is not None else "no_target"

    @property
    def why(self) -> str:
        """The reason, else the sign; "not_running" for an engine without a target for no other reason."""
        return self.reason or (self.sign if self.target is not None else "not_running")

    @property
    def explanation(self) -> str:
        """``why`` in words."""
        found = {**SIGNS, **REASONS, **NO_TARGET}.get(self.why, self.why)
        return f"{found}: {in_words(self.error)}" if self.error else found


def named_after(image: str) -> str:
    """Kind of unsupported server that an image (lower case) is named after: ``nim``, ``other_server`` or ""."""
    name = image.partition("@")[0]
    if "/nim/" in f"/{name}":
        return "nim"
    last = name.rpartition("/")[2].partition(":")[0]
    return "other_server" if any(word in last for word in _OTHER_SERVERS) else ""


def reason_of(named: bool, of_engine: bool, gpu: bool, worker: bool, other: str) -> str:
    """Why a container is no engine. ``named``: an annotation names another one; ``of_engine``: image or command name
    an engine.
    """
    if named:
        return "other_container_named"
    if other:
        return other
    if worker and gpu:
        return "worker"
    if of_engine:
        return "other_container" if gpu else "no_gpu"
    return "no_sign"


# --- engines that span pods ---------------------------------------------------------------------------------

_LWS: Final = "leaderworkerset.sigs.k8s.io/"
_RBG: Final = "rbg.workloads.x-k8s.io/"
_STORM: Final = "stormservice.orchestration.aibrix.ai/"
_KTHENA: Final = "modelserving.volcano.sh/"
_GROUPS: Final = (  # controller, labels that pods of one engine share, the label of the leader and its value
    ("LeaderWorkerSet", (_LWS + "name", _LWS + "group-index"), _LWS + "worker-index", "0"),
    ("RayCluster", ("ray.io/cluster",), "ray.io/node-type", "head"),
    ("KAITO", ("kaito.sh/workspace",), "apps.kubernetes.io/pod-index", "0"),
    ("RoleBasedGroup", (_RBG + "role-instance-name",), _RBG + "component-name", "leader"),
    ("PodSet", (_STORM + "podset-name",), _STORM + "pod-group-index", "0"),
    ("ModelServing", (_KTHENA + "group-name", _KTHENA + "role-id"), _KTHENA + "entry", "true"),
    ("InferenceService", ("serving.kserve.io/inferenceservice",), "", ""),  # whose replicas have the same label
)
_HERE: Final = ("", "localhost", "127.0.0.1", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods that run one engine. ``name``: the same on every node, unique in the namespace; "" = unknown. ``leads``:
    this pod may serve for all.
    """

    name: str
    leads: bool


def group_of(pod: str, addresses: Collection[str], labels: Mapping[str, Any], node: Node | None) -> PodGroup | None:
    """The group of a pod, by the labels of its controller, else by the leader's address in its command line; None
    without one. Where the leader has no label, the command line says which pod it is.
    """
    for kind, same, leader, value in _GROUPS:
        values, place = [text(labels.get(name)) for name in same], labels.get(leader)
        if all(values) and (isinstance(place, str) or node is not None):
            leads = place == value if isinstance(place, str) else node is not None and bool(node.leads)
            return PodGroup("/".join((kind, *values)), leads)
    if node is None or (node.leads is None and not node.address):
        return None
    here = node.address in (pod, *addresses, *_HERE)
    leads = here if node.leads is None else node.leads
    leader = node.address if not here else pod if leads else ""
    return PodGroup(leader and f"leader/{leader}", leads)


# --- workloads and roles ------------------------------------------------------------------------------------

_ROLE_LABELS: Final = (
    "llm-d.ai/role",  # also KServe's LLMInferenceService
    "disaggregatedset.x-k8s.io/role",
    "nvidia.com/dynamo-sub-component-type",
    "rbg.workloads.x-k8s.io/role-name",
    "modelserving.volcano.sh/role",
    "role-name",  # AIBrix StormService
    "component",  # OME, which calls the prefill side of a pair "engine" like a server of both
)
_ROLES: Final[Mapping[str, str]] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "decoder": "decode",
    "both": "both",
    "prefill-decode": "both",
    "encode-prefill-decode": "both",
}
_DEPLOYMENT_LABELS: Final = (  # of the object that people write, whose controller makes the pods of all roles
    "storm-service-name",
    "modelserving.volcano.sh/name",
    "nvidia.com/dynamo-graph-deployment-name",
    "ray.io/originated-from-cr-name",
    _RBG + "group-name",
    "disaggregatedset.x-k8s.io/name",
    "ome.io/inferenceservice",
)
_HASHES: Final = ("pod-template-hash", "rollouts-pod-template-hash")
_REVISIONS: Final = (_LWS + "template-revision-hash", *_HASHES, "controller-revision-hash")
_COUNTED: Final = ("ReplicaSet", "StatefulSet", "DaemonSet")
_ONE_TEMPLATE: Final = (*_COUNTED, "Job")


def workload_of(metadata: Mapping[str, Any]) -> Workload:
    """What owner and labels of a pod say about its pool. A pod without a controller is a workload of its own."""
    labels = mapping(metadata.get("labels"))
    role = next((_ROLES[word] for name in _ROLE_LABELS if (word := text(labels.get(name)).lower()) in _ROLES), "")
    revision = next(filter(None, (text(labels.get(label)) for label in _REVISIONS)), "")
    owner = next((one for one in mappings(metadata.get("ownerReferences")) if one.get("controller") is True), {})
    kind, name = text(owner.get("kind")), text(owner.get("name"))
    deployment = next(filter(None, (text(labels.get(label)) for label in _DEPLOYMENT_LABELS)), "")
    if kind in ("", "Node"):  # a static pod belongs to its node
        return Workload(text(metadata.get("name")), role, deployment=deployment)
    made = Workload(deployment or name, role, True, revision, deployment)
    if group := text(labels.get(_LWS + "name")):
        return replace(made, name=group, mixed=False, counted=True)
    if kind in _ONE_TEMPLATE:
        for label in _HASHES:
            name = name.removesuffix("-" + text(labels.get(label)))
        return replace(made, name=name, mixed=False, counted=kind in _COUNTED)
    return made
