"""What a pod template gives a server's container besides its arguments: CPU, GPUs, shared memory, time to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from kvpressure.model.arguments import GIB
from kvpressure.parsed import items, mapping, quantity

SHARED_MEMORY: Final = "/dev/shm"
DEFAULT_SHARED_BYTES: Final = GIB // 16  # 64 MiB, as container runtimes mount it
_DELAY: Final = 0.0  # Kubernetes' defaults of a probe: initialDelaySeconds, periodSeconds, failureThreshold
_PERIOD: Final = 10.0
_FAILURES: Final = 3.0


@dataclass(frozen=True, slots=True)
class HostSettings:
    """``cpu_limit``: cores; ``gpus``: GPUs of the container; ``shared_bytes``: size of /dev/shm, infinite without a
    limit of its own; ``start_seconds``: time after which ``start_probe`` restarts a server that does not answer yet.
    None = not set.
    """

    cpu_limit: float | None = None
    gpus: int | None = None
    shared_bytes: float | None = None
    start_seconds: float | None = None
    start_probe: str = ""


def host_settings(spec: Mapping[str, Any], container: Mapping[str, Any]) -> HostSettings:
    """The settings of ``container`` in the pod spec ``spec``."""
    limits = mapping(mapping(container.get("resources")).get("limits"))
    gpus = [quantity(value) for name, value in limits.items() if str(name).endswith(("/gpu", "/gpu.shared"))]
    seconds, probe = _start(container)
    return HostSettings(
        quantity(limits.get("cpu")),
        int(sum(filter(None, gpus))) or None,
        _shared(spec, container),
        seconds,
        probe,
    )


def _shared(spec: Mapping[str, Any], container: Mapping[str, Any]) -> float | None:
    if spec.get("hostIPC") is True:
        return inf
    mounted = [
        mount.get("name")
        for mount in map(mapping, items(container.get("volumeMounts")))
        if str(mount.get("mountPath")).rstrip("/") == SHARED_MEMORY
    ]
    volume = next((one for one in map(mapping, items(spec.get("volumes"))) if one.get("name") in mounted), None)
    if volume is None:
        return inf if mounted else None
    size = quantity(mapping(volume.get("emptyDir")).get("sizeLimit"))
    return inf if size is None else size


def _start(container: Mapping[str, Any]) -> tuple[float | None, str]:
    """(seconds, probe): a startup probe suspends the liveness probe until it succeeds."""
    for name in ("startupProbe", "livenessProbe"):
        probe = mapping(container.get(name))
        if probe:
            delay, period, failures = (
                default if (value := quantity(probe.get(key))) is None else value
                for key, default in (
                    ("initialDelaySeconds", _DELAY),
                    ("periodSeconds", _PERIOD),
                    ("failureThreshold", _FAILURES),
                )
            )
            return delay + period * failures, name
    return None, ""
