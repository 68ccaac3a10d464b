"""The source that asks the kubelet which container holds which GPU: PodResources API v1 over its unix socket.

One ``List`` a read, every 10 seconds by default (the kubelet limits callers, and a List has side effects there). The
kubelet replaces its socket when it restarts; that is seen by the file and the channel opened anew. Kubelets before
1.34 also list pods that have ended: among pods that claim the same exclusive device those known to run win.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvpressure.readings import GpuOwner, GpuReading
from kvpressure.sources.base import Reading, SourceError
from kvpressure.sources.devices import Device, from_dra, from_plugin
from kvpressure.sources.podspec import Pod

if TYPE_CHECKING:
    from kvpressure.settings import Settings

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
"""Reasons of this source. ``unknown_device`` counts devices whose id fits no GPU that was read."""

ENDED_PHASES: Final = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Claim:
    """A container that holds a device."""

    namespace: str
    pod: str
    container: str
    device: Device


class PodResourcesSource:
    """Owners of the GPUs. ``gpus`` and ``pods`` are asked at every read; ``None`` pods = not known."""

    name = "podresources"

    def __init__(
        self,
        settings: Settings,
        gpus: Callable[[], Sequence[GpuReading]] | None = None,
        pods: Callable[[], Sequence[Pod] | None] | None = None,
    ) -> None:
        shared = settings.shared
        self._socket = settings.kubelet_socket
        self._prefixes = settings.kubelet_resources
        self._gpus = gpus or (lambda: shared.gpus)
        self._pods = pods or (lambda: shared.pods)
        self._channel: Any = None
        self._file: tuple[int, int, int] | None = (
            None  # of the socket; an inode is used again, its time of change is not
        )

    def read(self) -> Reading:
        """Owners of every GPU. Raises ``SourceError`` when the kubelet cannot be asked."""
        claims, errors = self._claims(self._list())
        owners = owners_of(running(claims, self._pods() or ()))
        if len(owners) > MAX_OWNERS:
            errors["too_many_devices"] += len(owners) - MAX_OWNERS
        return Reading(owners=tuple(owners[:MAX_OWNERS]), errors=dict(errors))

    def close(self) -> None:
        """Close the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _list(self) -> Any:
        """One ``List``. A failed call drops the channel, so that the next one starts clean."""
        import grpc

        from kvpressure.sources._podresources import api_pb2

        self._open()
        call = self._channel.unary_unary(
            METHOD,
            request_serializer=api_pb2.ListPodResourcesRequest.SerializeToString,
            response_deserializer=api_pb2.ListPodResourcesResponse.FromString,
        )
        try:
            return call(api_pb2.ListPodResourcesRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            self.close()
            raise SourceError(_reason(error), _details(error)) from error

    def _open(self) -> None:
        try:
            found = self._socket.stat()
        except OSError as error:
            self.close()
            reason = "permission_denied" if isinstance(error, PermissionError) else "no_socket"
            raise SourceError(reason, f"{self._socket}: {error.strerror}") from error
        file = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if self._channel is not None and file == self._file:
            return
        import grpc

        self.close()
        self._file = file
        self._channel = grpc.insecure_channel(
            f"unix://{self._socket}",
            options=(
                ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )

    def _claims(self, answer: Any) -> tuple[list[Claim], Counter[str]]:
        gpus = self._gpus()
        claims: list[Claim] = []
        errors: Counter[str] = Counter()
        for pod in answer.pod_resources:
            for container in pod.containers:
                for device in self._devices(container, gpus):
                    if device is None:
                        errors["unknown_device"] += 1
                    else:
                        claims.append(Claim(pod.namespace, pod.name, container.name, device))
        return claims, errors

    def _devices(self, container: Any, gpus: Sequence[GpuReading]) -> Iterator[Device | None]:
        for group in container.devices:
            if group.resource_name.startswith(self._prefixes):
                for device_id in group.device_ids:
                    yield from_plugin(device_id, gpus)
        for resource in container.dynamic_resources:
            for claimed in resource.claim_resources:
                if claimed.driver_name in ("gpu.nvidia.com", "gpu.amd.com"):
                    yield from_dra(claimed.driver_name, claimed.device_name, gpus)


def _reason(error: Any) -> str:
    import grpc

    code, details = error.code(), _details(error)
    if code == grpc.StatusCode.UNAVAILABLE and "ermission denied" in details:
        return "permission_denied"
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return "too_large"
    if code == grpc.StatusCode.INTERNAL and "deserializ" in details:
        return "bad_answer"
    names = {
        grpc.StatusCode.UNAVAILABLE: "unavailable",
        grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
        grpc.StatusCode.UNIMPLEMENTED: "unimplemented",
        grpc.StatusCode.RESOURCE_EXHAUSTED: "throttled",
        grpc.StatusCode.PERMISSION_DENIED: "permission_denied",
    }
    return names.get(code, "error")


def _details(error: Any) -> str:
    return str(error.details() or "")


def running(claims: Iterable[Claim], pods: Iterable[Pod]) -> list[Claim]:
    """``claims`` without those of pods that have ended, as far as the pods are known."""
    phases: Mapping[tuple[str, str], str] = {(pod.namespace, pod.name): pod.phase for pod in pods}
    rivals: dict[Device, list[Claim]] = defaultdict(list)
    for claim in claims:
        if phases.get((claim.namespace, claim.pod)) not in ENDED_PHASES:
            rivals[claim.device].append(claim)
    kept: list[Claim] = []
    for device, group in rivals.items():
        alive = [claim for claim in group if phases.get((claim.namespace, claim.pod)) == "Running"]
        exclusive = not device.shared and len({(claim.namespace, claim.pod) for claim in group}) > 1
        kept += alive if exclusive and alive else group
    return kept


def owners_of(claims: Iterable[Claim]) -> list[GpuOwner]:
    """One owner for each GPU and container; a GPU with several pods is shared, and so is one whose id says so."""
    names: dict[tuple[str, str, str, str], bool] = {}
    pods: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for claim in claims:
        key = (claim.device.uuid, claim.namespace, claim.pod, claim.container)
        names[key] = names.get(key, False) or claim.device.shared
        pods[claim.device.uuid].add((claim.namespace, claim.pod))
    return [
        GpuOwner(uuid, namespace, pod, container, shared or len(pods[uuid]) > 1)
        for (uuid, namespace, pod, container), shared in sorted(names.items())
    ]
