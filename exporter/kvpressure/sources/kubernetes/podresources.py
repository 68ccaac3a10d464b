"""The source of GPU owners from the kubelet: PodResources API v1 over its unix socket.

One ``List`` per read, every 10 seconds by default (the kubelet limits callers, and a List has side effects there),
each on a new connection, because a restarting kubelet replaces its socket. Kubelets before 1.34 also list pods that
have ended: among pods that claim the same exclusive device, those known to run win.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.model.readings import GpuOwner, GpuReading
from kvpressure.sources.base import Reading, SourceError, SourceSettings, isolated
from kvpressure.sources.kubernetes.device_ids import from_dra, from_plugin, is_gpu_driver
from kvpressure.sources.kubernetes.grpc_call import CallError, unary
from kvpressure.sources.kubernetes.pod import ENDED_PHASES, Pod, groups_of_workers, leaders
from kvpressure.sources.kubernetes.podresources_message import (
    ContainerResources,
    MessageError,
    TooManyFieldsError,
    read_pods,
)
from kvpressure.sources.vendors import OwnedDevice

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


@dataclass(frozen=True, slots=True)
class Claim:
    """A container that holds a device."""

    namespace: str
    pod: str
    container: str
    device: OwnedDevice


class PodResourcesSource:
    """Owners of the GPUs. ``gpus`` and ``pods`` are called at every read; ``None`` pods = unknown."""

    name = "podresources"

    def __init__(
        self,
        settings: SourceSettings,
        gpus: Callable[[], Sequence[GpuReading]] | None = None,
        pods: Callable[[], Sequence[Pod] | None] | None = None,
    ) -> None:
        shared = settings.shared
        self._socket = settings.kubelet_socket
        self._prefixes = settings.kubelet_resources
        self._gpus = gpus or (lambda: shared.gpus)
        self._pods = pods or (lambda: shared.pods)

    def read(self) -> Reading:
        """Owners of every GPU. Raises ``SourceError`` when the kubelet does not answer."""
        claims, errors = self._claims(self._list())
        pods = self._pods() or ()
        owners = owners_of(joined(running(claims, pods), pods), groups_of_workers(pods))
        if len(owners) > MAX_OWNERS:
            errors["too_many_devices"] += len(owners) - MAX_OWNERS
        return Reading(owners=tuple(owners[:MAX_OWNERS]), errors=dict(errors))

    def close(self) -> None:
        """Does nothing; no resource is held."""

    def _list(self) -> bytes:
        """The answer to one ``List``."""
        try:
            self._socket.stat()
        except OSError as error:
            reason = "permission_denied" if isinstance(error, PermissionError) else "no_socket"
            raise SourceError(reason, f"{self._socket}: {error.strerror}") from error
        try:
            return unary(self._socket, METHOD, b"", CALL_SECONDS, MAX_ANSWER_BYTES)
        except CallError as error:
            raise SourceError(error.reason, str(error)) from error

    def _claims(self, answer: bytes) -> tuple[list[Claim], Counter[str]]:
        gpus = self._gpus()
        claims: list[Claim] = []
        errors: Counter[str] = Counter()
        try:
            for pod in read_pods(answer):
                for container in pod.containers:
                    with isolated(f"container {pod.namespace}/{pod.name}/{container.name}", errors):
                        for device in self._devices(container, gpus):
                            if device is None:
                                errors["unknown_device"] += 1
                            else:
                                claims.append(Claim(pod.namespace, pod.name, container.name, device))
        except TooManyFieldsError as error:
            raise SourceError("too_large", str(error)) from error
        except MessageError as error:
            raise SourceError("bad_answer", str(error)) from error
        return claims, errors

    def _devices(self, container: ContainerResources, gpus: Sequence[GpuReading]) -> Iterator[OwnedDevice | None]:
        for group in container.devices:
            if group.resource_name.startswith(self._prefixes):
                for device_id in group.device_ids:
                    yield from_plugin(device_id, gpus)
        for claimed in container.claimed:
            if is_gpu_driver(claimed.driver_name):
                yield from_dra(claimed.driver_name, claimed.device_name, gpus)


def running(claims: Iterable[Claim], pods: Iterable[Pod]) -> list[Claim]:
    """``claims`` without those of ended pods, as far as pods are known."""
    phases: Mapping[tuple[str, str], str] = {(pod.namespace, pod.name): pod.phase for pod in pods}
    rivals: dict[OwnedDevice, list[Claim]] = defaultdict(list)
    for claim in claims:
        if phases.get((claim.namespace, claim.pod)) not in ENDED_PHASES:
            rivals[claim.device].append(claim)
    kept: list[Claim] = []
    for device, group in rivals.items():
        alive = [claim for claim in group if phases.get((claim.namespace, claim.pod)) == "Running"]
        exclusive = not device.shared and len({(claim.namespace, claim.pod) for claim in group}) > 1
        kept += alive if exclusive and alive else group
    return kept


def joined(claims: Iterable[Claim], pods: Iterable[Pod]) -> list[Claim]:
    """``claims`` with those of workers assigned to their leader's engine, if the leader is on this node."""
    of_worker = leaders(pods)
    return [
        claim if place is None else Claim(*place, claim.device)
        for claim in claims
        for place in (of_worker.get((claim.namespace, claim.pod)),)
    ]


def owners_of(claims: Iterable[Claim], groups: Mapping[tuple[str, str], str]) -> list[GpuOwner]:
    """One owner per GPU and container; a GPU is shared if several pods claim it or its id says so. ``groups``: those
    of worker pods, whose engine another pod serves.
    """
    names: dict[tuple[str, str, str, str], bool] = {}
    pods: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for claim in claims:
        key = (claim.device.uuid, claim.namespace, claim.pod, claim.container)
        names[key] = names.get(key, False) or claim.device.shared
        pods[claim.device.uuid].add((claim.namespace, claim.pod))
    return [
        GpuOwner(uuid, namespace, pod, container, shared or len(pods[uuid]) > 1, groups.get((namespace, pod), ""))
        for (uuid, namespace, pod, container), shared in sorted(names.items())
    ]
