"""Which of several servers on one metrics endpoint a series belongs to, by labels that surrounding software adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Owner(NamedTuple):
    """``replica``: Ray's identifier of the server, new at each start. ``origin``: the pod or address from which a
    federation or OpenTelemetry collector got the series. Both "" = the endpoint is the server's own.
    """

    replica: str = ""
    origin: str = ""


PAGE_ITSELF = Owner()


def owner_of(labels: Mapping[str, str]) -> Owner:
    """The server by a series' labels: ReplicaId, else WorkerId, else pod or instance."""
    replica = labels.get("ReplicaId") or labels.get("WorkerId")
    if replica:
        return Owner(replica=replica)
    instance = labels.get("instance", "")
    pod = labels.get("pod") or labels.get("k8s_pod_name")
    if not pod:
        return Owner(origin=instance) if instance else PAGE_ITSELF
    namespace = labels.get("namespace") or labels.get("k8s_namespace_name")
    _, colon, port = instance.rpartition(":")  # the address changes with each start of the pod, its port does not
    return Owner(origin=f"{namespace}/{pod}{colon}{port}" if namespace else f"{pod}{colon}{port}")
