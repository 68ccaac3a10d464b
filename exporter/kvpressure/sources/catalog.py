"""The catalog of sources: data from which settings, documents and the monitor take names, help and intervals.

A source's code is imported by its ``factory``, only when it is switched on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvpressure.extension_points import offered
from kvpressure.sources.gpu.amd import device_ids as amd_ids
from kvpressure.sources.gpu.nvidia import device_ids as nvidia_ids
from kvpressure.sources.vendors import GpuVendor


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """An entry of the catalog. ``factory`` builds the source from the settings. ``default``: on without a flag.
    ``hold_seconds``: how long its last reading stays in snapshots (0 = only in the tick it arrived in). ``settings``:
    prefixes of settings that only this source reads. ``gpus``: vendor of the GPUs it reads.
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


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """Whether a source runs, its interval, and the seconds after which a read counts as hanging."""

    enabled: bool
    interval_seconds: float
    deadline_seconds: float


_REGISTRY: dict[str, SourceSpec] = {}


def register(spec: SourceSpec) -> SourceSpec:
    """Add a source; its name becomes ``--collector.<name>`` and the ``source`` label. Raises ``ValueError`` for a
    known name.
    """
    if spec.name in _REGISTRY:
        raise ValueError(f"source {spec.name!r} registered twice")
    _REGISTRY[spec.name] = spec
    return spec


def remove(name: str) -> None:
    """Remove a source."""
    _REGISTRY.pop(name, None)


def adopt(name: str) -> bool:
    """Use the source of this name, built in or from an installed package; False if there is none. Raises
    ``InputError``.
    """
    if name in _REGISTRY:
        return True
    found = offered("source", name, SourceSpec)
    if found is not None:
        register(found)
    return found is not None


def registry() -> dict[str, SourceSpec]:
    """All sources by name."""
    return dict(_REGISTRY)


def lazy(module: str, attribute: str) -> Callable[[Any], Any]:
    """A factory that imports ``module`` only when the source is switched on."""

    def build(settings: Any) -> Any:
        return getattr(import_module(module), attribute)(settings)

    return build


register(
    SourceSpec(
        name="nvidia",
        help="NVIDIA GPUs through NVML",
        factory=lazy("kvpressure.sources.gpu.nvidia.source", "NvidiaSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
        settings=("nvidia.",),
        gpus=GpuVendor("0x10de", ("nvidia.com/",), "gpu.nvidia.com", nvidia_ids.from_plugin, nvidia_ids.from_dra),
    )
)
register(
    SourceSpec(
        name="amd",
        help="AMD GPUs, through sysfs or AMD SMI",
        factory=lazy("kvpressure.sources.gpu.amd.source", "AmdSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
        settings=("gpu.amd.",),
        gpus=GpuVendor("0x1002", ("amd.com/",), "gpu.amd.com", amd_ids.from_plugin, amd_ids.from_dra),
    )
)
register(
    SourceSpec(
        name="engines",
        help="metrics endpoints of engines",
        factory=lazy("kvpressure.sources.scrape.source", "EngineSource"),
        interval_seconds=1.0,
        deadline_seconds=5.0,
        settings=("engine.",),
    )
)
register(
    SourceSpec(
        name="recording",
        help="a recording, played instead of live sources",
        factory=lazy("kvpressure.recording.source", "RecordingSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
        settings=("recording.",),
    )
)
register(
    SourceSpec(
        name="demo",
        help="a simulated node with engines and GPUs, on which an incident comes and goes",
        factory=lazy("kvpressure.demo.source", "DemoSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
    )
)
# --- on a Kubernetes node; the deployment switches them on ---------------------------------------------------------
register(
    SourceSpec(
        name="pods",
        help="engines among the pods of this node, from the Kubernetes API server",
        factory=lazy("kvpressure.sources.kubernetes.pods", "PodsSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=10.0,
        hold_seconds=6.0,
    )
)
register(
    SourceSpec(
        name="node",
        help="conditions of this node, from the Kubernetes API server",
        factory=lazy("kvpressure.sources.kubernetes.node", "NodeSource"),
        default=False,
        interval_seconds=30.0,
        deadline_seconds=15.0,
        hold_seconds=75.0,
    )
)
register(
    SourceSpec(
        name="podresources",
        help="which container holds which GPU, from the kubelet",
        factory=lazy("kvpressure.sources.kubernetes.podresources", "PodResourcesSource"),
        default=False,
        interval_seconds=10.0,
        deadline_seconds=8.0,
        hold_seconds=25.0,
    )
)
register(
    SourceSpec(
        name="procfs",
        help="the pod of each process on the GPUs, from the host's /proc",
        factory=lazy("kvpressure.sources.host.procfs", "ProcfsSource"),
        default=False,
        interval_seconds=10.0,
        deadline_seconds=5.0,
        hold_seconds=25.0,
    )
)
register(
    SourceSpec(
        name="cgroup",
        help="CPU and memory of the engines' containers, from cgroup v2",
        factory=lazy("kvpressure.sources.host.cgroup", "CgroupSource"),
        default=False,
        interval_seconds=2.0,
        deadline_seconds=5.0,
        hold_seconds=6.0,
    )
)
register(
    SourceSpec(
        name="plugin",
        settings=("plugin.",),
        help="files in which the plugin inside vLLM reports torch's allocator and the batch of every step",
        factory=lazy("kvpressure.sources.plugin_reports", "PluginSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
        hold_seconds=3.0,
    )
)
register(
    SourceSpec(
        name="logs",
        help="events in the logs of the engines' containers, from files on the node",
        factory=lazy("kvpressure.sources.host.container_logs", "LogsSource"),
        default=False,
        interval_seconds=1.0,
        deadline_seconds=5.0,
    )
)
