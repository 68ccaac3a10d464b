"""The source of GPU owners from the kubelet: PodResources API v1 over its unix socket.

One ``List`` per read, every 10 seconds by default (the kubelet limits callers, and a List has side effects there),
each on a new connection, because a restarting kubelet replaces its socket. Kubelets before 1.34 also list pods that
have ended: among pods that claim the same exclusive device, those known to run win.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvpressure.model.readings import GpuOwner, GpuReading
from kvpressure.sources.base import Reading, Source, SourceSettings, isolated, needed
from kvpressure.sources.kubernetes.device_ids import from_dra, from_plugin
from kvpressure.sources.kubernetes.grpc_call import unary
from kvpressure.sources.kubernetes.pod import ENDED_PHASES, Pod, groups_of_workers, leaders
from kvpressure.sources.kubernetes.podresources_message import (
    ContainerResources,
    read_containers,
)
from kvpressure.sources.vendors import OwnedDevice, is_network

METHOD: Final = "/v1.PodResourcesLister/List"
CALL_SECONDS: Final = 4.0
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
MAX_OWNERS: Final = 4096

REASONS: Final = (
    "no_socket",
    "permission_denied",
    "unavailable",
    "timeout",
    "unimplemented",
    "throttled",
    "too_large",
    "bad_answer",
    "error",
    "unknown_device",
    "too_many_devices",
)
"""Reasons of this source. ``unknown_device`` counts devices whose id matches no GPU that was read."""


class PodResourcesSource(Source):
    """Owners of the GPUs."""

    name = "podresources"

    def __init__(self, settings: SourceSettings) -> None:
        self._shared = settings.shared
        self._socket = settings.kubelet_socket
        self._prefixes = settings.kubelet_resources

    def read(self) -> Reading:
        """Owners of every GPU. Raises ``SourceError`` when the kubelet does not answer."""
        claims, errors = self._claims(self._list())
        pods = self._shared.pods or ()
        owners = of_engines(running(claims, pods), pods)
        if len(owners) > MAX_OWNERS:
            errors["too_many_devices"] += len(owners) - MAX_OWNERS
        return Reading(owners=tuple(owners[:MAX_OWNERS]), errors=dict(errors))

    def _list(self) -> bytes:
        """The answer to one ``List``."""
        with needed(self._socket, "no_socket"):
            self._socket.stat()
        return unary(self._socket, METHOD, b"", CALL_SECONDS, MAX_ANSWER_BYTES)

    def _claims(self, answer: bytes) -> tuple[list[GpuOwner], Counter[str]]:
        gpus = self._shared.gpus
        claims: list[GpuOwner] = []
        errors: Counter[str] = Counter()
        for container in read_containers(answer):
            place = container.namespace, container.pod, container.name
            with isolated(f"container {'/'.join(place)}", errors):
                for device in self._devices(container, gpus):
                    if device is None:
                        errors["unknown_device"] += 1
                    else:
                        claims.append(GpuOwner(device.uuid, *place, device.shared))
        return claims, errors

    def _devices(self, container: ContainerResources, gpus: Sequence[GpuReading]) -> Iterator[OwnedDevice | None]:
        for resource, device_id in container.devices:
            if resource.startswith(self._prefixes) and not is_network(resource):
                yield from_plugin(device_id, gpus)
        for driver, device_name in container.claimed:
            yield from from_dra(driver, device_name, gpus)


def running(claims: Iterable[GpuOwner], pods: Iterable[Pod]) -> list[GpuOwner]:
    """``claims`` without those of ended pods, as far as pods are known."""
    phases: Mapping[tuple[str, str], str] = {(pod.namespace, pod.name): pod.phase for pod in pods}
    rivals: dict[tuple[str, bool], list[GpuOwner]] = defaultdict(list)
    for claim in claims:
        if phases.get((claim.namespace, claim.pod)) not in ENDED_PHASES:
            rivals[claim.uuid, claim.shared].append(claim)
    kept: list[GpuOwner] = []
    for (_, shared), group in rivals.items():
        alive = [claim for claim in group if phases.get((claim.namespace, claim.pod)) == "Running"]
        exclusive = not shared and len({(claim.namespace, claim.pod) for claim in group}) > 1
        kept += alive if exclusive and alive else group
    return kept


def of_engines(claims: Iterable[GpuOwner], pods: Sequence[Pod]) -> list[GpuOwner]:
    """Each of ``claims`` once. The engine of a worker is its leader's, if that is on this node, else its group's."""
    of_worker, groups = leaders(pods), groups_of_workers(pods)
    owners = []
    for claim in claims:
        own = claim.namespace, claim.pod
        namespace, pod, container = of_worker.get(own, (*own, claim.container))
        group = groups.get((namespace, pod), "")
        owners.append(GpuOwner(claim.uuid, namespace, pod, container, claim.shared, group))
    return sorted(set(owners), key=lambda owner: (owner.uuid, owner.namespace, owner.pod, owner.container))
