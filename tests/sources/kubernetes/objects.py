"""Kubernetes objects for tests, as the API server sends them."""

from __future__ import annotations

import hashlib
from typing import Any

Json = dict[str, Any]
NODE = "node-1"


def uid_of(namespace: str, name: str) -> str:
    h = hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:32]}"


def of_static_pod(uid: str) -> Json:
    """Annotations of the mirror of a static pod, which the node knows by ``uid``."""
    return {f"kubernetes.io/config.{name}": uid for name in ("hash", "mirror")}


def container_id(namespace: str, pod: str, container: str, restarts: int = 0) -> str:
    """A stable container id, as 64 hexadecimal digits."""
    return hashlib.sha256(f"{namespace}/{pod}/{container}/{restarts}".encode()).hexdigest()


def container(name: str = "vllm", **fields: Any) -> Json:
    """A container of a pod's spec that runs vLLM, unless ``fields`` say otherwise."""
    return {
        "name": name,
        "image": "vllm/vllm-openai:v0.32.0",
        "command": ["vllm", "serve", "org/model", "--max-num-seqs", "64"],
        "ports": [{"containerPort": 8000, "name": "http"}],
        "resources": {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}},
        **fields,
    }


def pod(
    name: str = "vllm-0",
    namespace: str = "inference",
    ip: str | None = "10.0.0.5",
    node: str = NODE,
    containers: list[Json] | None = None,
    labels: Json | None = None,
    annotations: Json | None = None,
    phase: str = "Running",
    restarts: int = 0,
    ready: bool = True,
    last: Json | None = None,
    host_network: bool = False,
    status: Json | None = None,
    owner: tuple[str, str] | None = None,
) -> Json:
    """A pod with its status. ``owner``: kind and name of its controller."""
    containers = [container()] if containers is None else containers
    statuses = [
        {
            "name": c["name"],
            "ready": ready,
            "restartCount": restarts,
            "state": {"running": {}},
            "lastState": {"terminated": last} if last else {},
            "containerID": f"containerd://{container_id(namespace, name, c['name'], restarts)}",
        }
        for c in containers
    ]
    spec: Json = {"nodeName": node, "containers": containers}
    if host_network:
        spec["hostNetwork"] = True
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid_of(namespace, name),
            "labels": labels or {},
            "annotations": annotations or {},
            "ownerReferences": [{"kind": owner[0], "name": owner[1], "controller": True}] if owner else [],
        },
        "spec": spec,
        "status": {"phase": phase, "podIP": ip, "containerStatuses": statuses, **(status or {})},
    }


def node(**conditions: str) -> Json:
    return {
        "kind": "Node",
        "metadata": {"name": NODE},
        "status": {"conditions": [{"type": name, "status": value} for name, value in conditions.items()]},
    }
