"""The catalog of sources: data from which settings, documents and the monitor take names, help and intervals.

A source's code is imported by its ``factory``, only when it is switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from kvpressure.sources.gpu.amd import device_ids as amd_ids
from kvpressure.sources.gpu.nvidia import device_ids as nvidia_ids
from kvpressure.sources.vendors import GpuVendor

USUAL_TICK: Final = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """An entry of the catalog. ``factory`` builds the source from the settings. ``default``: on without a flag.
    ``interval_seconds``: between readings at the usual tick; ``deadline_seconds``: then a reading hangs.
    ``hold_seconds``: how long its last reading stays in snapshots (0 = only in the tick it arrived in). ``settings``:
    prefixes of settings that only this source reads. ``gpus``: vendor of the GPUs it reads. ``unless``: sources that do
    the same elsewhere, so that it is off beside them.
    """

    name: str
    help: str
    factory: Callable[[Any], Any]
    default: bool = True
    interval_seconds: float = 1.0
    deadline_seconds: float = 5.0
    hold_seconds: float = 0.0
    settings: tuple[str, ...] = ()
    gpus: GpuVendor | None = None
    unless: tuple[str, ...] = ()

    def pace(self, enabled: bool, tick: float) -> CollectorSettings:
        """How it runs where a tick takes so many seconds: as often as usual, and faster with a faster tick. Nothing is
        read that no tick takes.
        """
        interval = max(tick, self.interval_seconds * min(USUAL_TICK, tick))
        return CollectorSettings(enabled, interval, self.deadline_seconds)


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """Whether a source runs, its interval, and the seconds after which a read counts as hanging."""

    enabled: bool
    interval_seconds: float
    deadline_seconds: float


def lazy(module: str, attribute: str) -> Callable[[Any], Any]:
    """A factory that imports ``module`` only when the source is switched on."""

    def build(settings: Any) -> Any:
        return getattr(import_module(module), attribute)(settings)

    return build


_SOURCES: Final = (
    SourceSpec(
        name="nvidia",
        help="NVIDIA GPUs through NVML",
        factory=lazy("kvpressure.sources.gpu.nvidia.source", "NvidiaSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
        settings=("nvidia.",),
        gpus=GpuVendor(("nvidia.com/",), "gpu.nvidia.com", nvidia_ids.from_plugin, nvidia_ids.from_dra),
    ),
    SourceSpec(
        name="amd",
        help="AMD GPUs, through sysfs, and AMD SMI for what it lacks",
        factory=lazy("kvpressure.sources.gpu.amd.source", "AmdSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
        gpus=GpuVendor(("amd.com/",), "gpu.amd.com", amd_ids.from_plugin, amd_ids.from_dra),
    ),
    SourceSpec(
        name="engines",
        help="metrics endpoints of engines",
        factory=lazy("kvpressure.sources.scrape.source", "EngineSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        settings=("engine.",),
    ),
    SourceSpec(
        name="processes",
        help="engines among the processes of this host, from /proc; off beside pods",
        factory=lazy("kvpressure.sources.host.processes", "ProcessesSource"),
        interval_seconds=10.0,
        deadline_seconds=5.0,
        hold_seconds=25.0,
        unless=("pods",),
    ),
    # --- on a Kubernetes node; the deployment switches them on
    SourceSpec(
        name="pods",
        help="engines among the pods of this node, from the Kubernetes API server",
        factory=lazy("kvpressure.sources.kubernetes.pods", "PodsSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=10.0,
        hold_seconds=6.0,
    ),
    SourceSpec(
        name="node",
        help="conditions of this node, from the Kubernetes API server",
        factory=lazy("kvpressure.sources.kubernetes.node", "NodeSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=10.0,
        hold_seconds=6.0,
    ),
    SourceSpec(
        name="podresources",
        help="which container holds which GPU, from the kubelet",
        factory=lazy("kvpressure.sources.kubernetes.podresources", "PodResourcesSource"),
        default=False,
        interval_seconds=10.0,
        deadline_seconds=8.0,
        hold_seconds=25.0,
    ),
    SourceSpec(
        name="procfs",
        help="the pod of each process on the GPUs, from the host's /proc",
        factory=lazy("kvpressure.sources.host.procfs", "ProcfsSource"),
        default=False,
        interval_seconds=10.0,
        deadline_seconds=5.0,
        hold_seconds=25.0,
    ),
    SourceSpec(
        name="cgroup",
        help="CPU and memory of the engines' containers, from cgroup v2",
        factory=lazy("kvpressure.sources.host.cgroup", "CgroupSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=5.0,
        hold_seconds=6.0,
    ),
    SourceSpec(
        name="logs",
        help="events in the logs of the engines' containers, from files on the node",
        factory=lazy("kvpressure.sources.host.container_logs", "LogsSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
    ),
)
_BY_NAME: Final = {spec.name: spec for spec in _SOURCES}


def registry() -> Mapping[str, SourceSpec]:
    """All sources by name; the name is also the ``source`` label and makes ``--collector.<name>``."""
    return _BY_NAME
